"""Pages between pools: compiled and by PyTorch, the same bytes, and nothing beyond the pages named."""

import pytest
import torch

from forebay.core.messages import Copy
from forebay.runtime import page_copy
from forebay.runtime.page_copy import PagePairs, Piece


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(page_copy, "library", lambda: None)
    else:
        assert page_copy.library() is not None


def pools(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Device pages in one piece, host pages inside larger blocks."""
    device = torch.arange(4 * 30).view(4, 2, 3, 5).to(dtype)
    blocks = torch.zeros(6, 3, 2, 3, 5, dtype=dtype)
    return device, blocks[:, 1]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_pages_go_out_and_back_and_leave_others_alone(dtype: torch.dtype) -> None:
    device, host = pools(dtype)
    before = device.clone()
    pairs = PagePairs((Copy(3, 0), Copy(1, 5)))
    piece = Piece(device, host)
    piece.save(pairs)
    assert torch.equal(host[0], before[3]) and torch.equal(host[5], before[1])
    assert not host[1:5].any()
    device.zero_()
    piece.load(pairs)
    assert torch.equal(device[3], before[3]) and torch.equal(device[1], before[1])
    assert not device[0].any() and not device[2].any()


@pytest.mark.usefixtures("way")
def test_no_copies_are_no_work() -> None:
    device, host = pools(torch.float32)
    before = device.clone()
    Piece(device, host).load(PagePairs(()))
    assert torch.equal(device, before)


@pytest.mark.parametrize("copy", [Copy(4, 0), Copy(0, 6), Copy(-1, 0)])
def test_a_page_that_is_not_there_is_an_error_and_no_write(copy: Copy) -> None:
    device, host = pools(torch.float32)
    with pytest.raises(IndexError):
        Piece(device, host).save(PagePairs((Copy(0, 0), copy)))
    assert not host.any()
