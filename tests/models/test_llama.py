"""The forward pass against transformers on the same weights, and against itself in other batch shapes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from forebay.models.batch import SequenceWork, build_batch
from forebay.models.errors import ModelError
from forebay.models.llama import Kernels

TOLERANCE = 1e-3
PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 23, 71, 12, 54, 33, 2, 90, 7, 19, 45, 66, 81, 30]
PAGES = [9, 4, 17, 1, 30, 12]  # scattered on purpose: 96 tokens of 16

VARIANTS = {
    "tied, all heads alike": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "attention and mlp bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "explicit head_dim": ("Llama", {"head_dim": 16}),
    "llama3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "yarn rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn rope with its own attention factor": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.3,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            }
        },
    ),
    "yarn rope of the whole context": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "dynamic rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def greedy(model, prompt, steps):
    """Greedy tokens and per-step logits of transformers, with its own cache."""
    tokens, rows, cache, ids = [], [], None, torch.tensor([prompt])
    while len(tokens) < steps:
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(rows)


def assert_same_text(ours, theirs, logits, gap_max):
    """Equal tokens, or the reference was nearly undecided where they first differ."""
    for ours_token, theirs_token, row in zip(ours, theirs, logits, strict=True):
        if ours_token != theirs_token:
            top = row.topk(2).values
            assert float(top[0] - top[1]) <= gap_max
            return


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(name, make_model, reference, pipeline):
    family, changes = VARIANTS[name]
    path = make_model(family, **changes)
    tokens, logits = greedy(reference(path), PROMPT, 24)
    for pp, kernels in ((1, Kernels.NATIVE), (3, Kernels.NATIVE), (1, Kernels.TORCH)):
        ours, rows = pipeline(path, pp, kernels=kernels).generate(PROMPT, 24, PAGES)
        assert (rows - logits).abs().max() <= TOLERANCE
        assert ours == tokens


@pytest.mark.parametrize("kernels", [Kernels.NATIVE, Kernels.TORCH])
def test_bfloat16_text_follows_transformers(make_model, reference, pipeline, kernels):
    path = make_model()
    tokens, logits = greedy(reference(path, torch.bfloat16), PROMPT, 32)
    ours, rows = pipeline(path, 2, torch.bfloat16, kernels=kernels).generate(PROMPT, 32, PAGES)
    assert rows.dtype == torch.float32
    assert_same_text(ours, tokens, logits, 0.25)


@pytest.fixture(scope="module")
def small(make_model, reference):
    path = make_model()
    with torch.inference_mode():
        return path, reference(path)(torch.tensor([PROMPT])).logits[0]


def test_chunks_give_what_one_pass_gives(small, pipeline):
    path, logits = small
    for cuts in ([16], [1, 2, 3], [20], [7, 14]):
        model = pipeline(path, 2)
        bounds = [0, *cuts, len(PROMPT)]
        for start, stop in itertools.pairwise(bounds):
            row = model.run(
                PROMPT[start:stop], [SequenceWork(stop - start, start, PAGES, sample=True)]
            )
            assert (row[0] - logits[stop - 1]).abs().max() <= TOLERANCE


def test_prefix_pages_serve_another_sequence(small, pipeline):
    path, logits = small
    model = pipeline(path)
    model.run(PROMPT, [SequenceWork(len(PROMPT), 0, [3, 4])])
    row = model.run(PROMPT[16:], [SequenceWork(len(PROMPT) - 16, 16, [3, 8], sample=True)])
    assert (row[0] - logits[-1]).abs().max() <= TOLERANCE


def test_suppressed_write_reads_the_page_and_leaves_it_alone(small, pipeline):
    """Rule R7: all pages are cached, one token runs."""
    path, logits = small
    model = pipeline(path)
    model.run(PROMPT[:16], [SequenceWork(16, 0, [3])])
    before = [pool.clone() for pool in model.pools[0].keys + model.pools[0].values]
    row = model.run(PROMPT[15:16], [SequenceWork(1, 15, [3], write_from=16, sample=True)])
    assert (row[0] - logits[15]).abs().max() <= TOLERANCE
    after = model.pools[0].keys + model.pools[0].values
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_suppressed_rows_of_a_longer_span(small, pipeline):
    path, logits = small
    model = pipeline(path)
    model.run(PROMPT[:16], [SequenceWork(16, 0, [3])])
    row = model.run(
        PROMPT[10:], [SequenceWork(len(PROMPT) - 10, 10, [3, 5], write_from=16, sample=True)]
    )
    assert (row[0] - logits[-1]).abs().max() <= TOLERANCE


def test_suppressed_row_attends_to_the_page_not_to_its_own_key(small, pipeline):
    """A poisoned page must show in the answer, or the row did not read it."""
    path, logits = small
    model = pipeline(path)
    model.run(PROMPT[:16], [SequenceWork(16, 0, [3])])
    model.pools[0].values[0][3, :, 15] += 5.0
    row = model.run(PROMPT[15:16], [SequenceWork(1, 15, [3], write_from=16, sample=True)])
    assert (row[0] - logits[15]).abs().max() > 10 * TOLERANCE


def test_mixed_batches_equal_lone_sequences(small, reference, pipeline):
    """Random plans of prefills, chunks and decodes; every sampled row equals the reference's."""
    path, _ = small
    oracle = reference(path)
    chance = random.Random(3)
    texts = [[chance.randrange(97) for _ in range(chance.randrange(20, 60))] for _ in range(6)]
    expected = [oracle(torch.tensor([text])).logits[0] for text in texts]
    model = pipeline(path, 2)
    free = list(range(64))
    chance.shuffle(free)
    tables = [[free.pop() for _ in range(4)] for _ in texts]
    done = [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        unfinished = [i for i, text in enumerate(texts) if done[i] < len(text)]
        picked = chance.sample(unfinished, chance.randrange(1, len(unfinished) + 1))
        works, ids, wanted = [], [], []
        for i in picked:
            rows = min(chance.choice([1, 1, 1, 5, 13]), len(texts[i]) - done[i])
            ids += texts[i][done[i] : done[i] + rows]
            sample = chance.random() < 0.7
            works.append(SequenceWork(rows, done[i], tables[i], sample=sample))
            done[i] += rows
            if sample:
                wanted.append(expected[i][done[i] - 1])
        rows = model.run(ids, works)
        assert rows.shape == (len(wanted), 97)
        if wanted:
            assert (rows - torch.stack(wanted)).abs().max() <= TOLERANCE


def test_long_decodes_attend_to_every_page(small, reference, pipeline):
    path, _ = small
    text = [(i * 31) % 97 for i in range(300)]
    logits = reference(path)(torch.tensor([text])).logits[0]
    model = pipeline(path)
    table = list(range(40, 59))
    model.run(text[:-1], [SequenceWork(299, 0, table)])
    model.run(PROMPT, [SequenceWork(len(PROMPT), 0, [0, 1])])
    rows = model.run(
        [text[-1], 5],
        [SequenceWork(1, 299, table, sample=True), SequenceWork(1, len(PROMPT), [0, 1])],
    )
    assert (rows[0] - logits[-1]).abs().max() <= TOLERANCE


def test_layers_are_announced_in_order(small, pipeline):
    path, _ = small
    model = pipeline(path, 3)
    model.run(PROMPT, [SequenceWork(len(PROMPT), 0, PAGES)])
    assert model.seen_layers == [0, 1, 0, 0]


def test_layer_is_announced_before_its_pages_are_touched(small, pipeline):
    path, _ = small
    model = pipeline(path)
    touched = []
    stage, pool = model.stages[0], model.pools[0]

    batch = build_batch([SequenceWork(len(PROMPT), 0, PAGES)], pool.page_size)
    stage.forward(
        torch.tensor(PROMPT),
        batch,
        pool,
        lambda layer: touched.append(bool(pool.keys[layer].any())),
    )
    assert touched == [False] * 4


def test_too_many_stages_is_one_clear_line(small, pipeline):
    path, _ = small
    with pytest.raises(ModelError, match="pp 5 does not fit a model of 4 layers"):
        pipeline(path, 5)
