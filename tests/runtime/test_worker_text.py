"""Real worker processes, driven plan by plan, give the text that transformers gives."""

import random
import tempfile
from pathlib import Path

import pytest

from forebay.core.messages import Plan, Remap, Stop
from forebay.core.sampling import SamplingParams
from tests.runtime import tiny_llama
from tests.runtime.conftest import Grids
from tests.runtime.scripted_planner import EPOCH, GREEDY, Request, ScriptedPlanner, Work

GRIDS = [(1, 1), (2, 1), (1, 2)]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(tiny_llama.VOCAB_SIZE), k=length)


def check(model: Path, *requests: Request) -> None:
    for request in requests:
        assert request.output == tiny_llama.greedy(
            model, request.tokens[: request.prompt_tokens], len(request.output)
        )


def story(planner: ScriptedPlanner, model: Path) -> None:
    """Chunks in flight together, mixed plans, shared prefixes, a full hit, a remap, slots taken again."""
    first = planner.request(0, prompt(1, 22))
    chunks = [planner.plan(Work(first, 8)), planner.plan(Work(first, 8))]
    assert planner.finish(chunks[0]) == ()
    # The last chunk runs beside another request's prompt, which begins with two pages that the first one is still computing.
    planner.finish(chunks[1])
    second = planner.request(1, first.tokens[:8] + prompt(2, 9), shared=first.table[:2])
    planner.run(Work(first, 6), Work(second, 9))
    planner.decode(5, first, second)
    check(model, first, second)

    # Slot 0 again: all pages of the prompt are cached, so one token runs and writes nothing (rule R7).
    third = planner.request(0, first.tokens[:8], shared=first.table[:2])
    assert third.computed == 7
    planner.run(Work(third, 1, write_from=8), Work(second, 1))
    planner.decode(4, third, second)

    # A twin computes the first page again, in a page of its own, and is then given the first one's (rule R8).
    twin = planner.request(2, first.tokens[:4] + prompt(3, 3))
    planner.run(Work(twin, 7), Work(third, 1))
    twin.table[0] = first.table[0]
    planner.run(Work(twin, 1), Work(second, 1), remaps=[Remap(2, 0, first.table[0])])
    planner.decode(6, twin, second, third)
    check(model, first, second, third, twin)


@pytest.mark.parametrize(("pp", "tp"), GRIDS)
def test_text_equals_the_references(grids: Grids, tiny_model: Path, pp: int, tp: int) -> None:
    planner = grids(pp, tp)
    story(planner, tiny_model)
    assert all(ready.s_per_token > 0 for ready in planner.ready.values())


def test_a_sampled_text_goes_on_the_same_after_a_crash(grids: Grids) -> None:
    """Prompt and emitted tokens run again, as after a restart: the tokens that follow are those that would have (rule R3)."""
    planner = grids(2, 1)
    params = SamplingParams(
        temperature=1.0, top_p=0.9, seed=12, repetition_penalty=1.2, frequency_penalty=0.4
    )
    whole = planner.request(0, prompt(5, 10), params)
    planner.run(Work(whole, 10))
    planner.decode(8, whole)
    again = planner.request(1, whole.tokens[:14], params)
    again.prompt_tokens = 10
    other = planner.request(2, prompt(6, 3), SamplingParams(seed=3))
    planner.run(Work(again, 14), Work(other, 3))
    planner.decode(4, other, again)
    assert again.tokens == whole.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dtype"), [(3, "float32"), (4, "bfloat16")])
def test_tensor_parallel_ranks_compute_the_same_again_after_a_crash(
    tmp_path: Path, tp: int, dtype: str
) -> None:
    """To the bit: decoded alone, then prompt and emitted tokens together, cut elsewhere and beside another request (rule R3)."""
    model = tiny_llama.make(
        tmp_path, hidden_size=32 * tp, num_attention_heads=2 * tp, num_key_value_heads=tp
    )
    params = SamplingParams(temperature=1.0, seed=12, logprobs=3)
    with ScriptedPlanner(model, 1, tp, dtype=dtype).start() as planner:
        whole = planner.request(0, prompt(5, 10), params)
        alone = [planner.run(Work(whole, count))[0].logprobs for count in (10, *[1] * 12)]
        other = planner.request(1, prompt(6, 30), SamplingParams(seed=3))
        planner.run(Work(other, 30))
        again = planner.request(2, whole.tokens[:18], params)
        again.prompt_tokens = 10
        planner.run(Work(other, 1), Work(again, 7))
        after = [
            planner.run(Work(other, 1), Work(again, count))[1].logprobs
            for count in (11, 1, 1, 1, 1)
        ]
        assert again.tokens == whole.tokens
        assert after == alone[8:]


def test_logprobs_come_with_the_tokens(grids: Grids, tiny_model: Path) -> None:
    planner = grids(2, 1)
    request = planner.request(0, prompt(7, 6), GREEDY.replace(logprobs=2))
    (sample,) = planner.run(Work(request, 6))
    expected = tiny_llama.logits(tiny_model, prompt(7, 6))[-1].log_softmax(-1)
    assert sample.logprobs is not None
    assert (
        sample.logprobs.chosen
        == sample.logprobs.top[0]
        == pytest.approx(float(expected.max()), abs=1e-4)
    )
    assert sample.logprobs.top_ids == tuple(expected.topk(2).indices.tolist())


def test_messages_of_another_epoch_are_dropped(grids: Grids, tiny_model: Path) -> None:
    planner = grids(2, 1)
    planner.broadcast(Stop(EPOCH - 1, "for the ranks before us"))
    planner.broadcast(Plan(EPOCH + 1, 10**6, (), (), (), b""))
    request = planner.request(0, prompt(8, 5))
    planner.run(Work(request, 5))
    check(tiny_model, request)


def test_the_worker_uses_no_shared_memory_files(grids: Grids) -> None:
    for process in grids(2, 1).processes:
        assert "/dev/shm" not in Path(f"/proc/{process.pid}/maps").read_text()
        names = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        # "(deleted)": a test runner's own capture files, inherited as stdout and stderr.
        ours = [name for name in names if not name.endswith("(deleted)")]
        assert not [name for name in ours if name.startswith(("/dev/shm", tempfile.gettempdir()))]
