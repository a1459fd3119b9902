"""What is read from config.json, and what is refused with one clear line."""

from __future__ import annotations

import json

import pytest

from forebay.models.config import load_config
from forebay.models.errors import ModelError

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


@pytest.fixture
def read(tmp_path):
    def load(generation=None, **changes):
        raw = {key: value for key, value in {**GOOD, **changes}.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_config(tmp_path)

    return load


def test_defaults_are_those_of_the_architecture(read):
    config = read()
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 4, 16)
    assert (config.rope_theta, config.rope_scaling, config.norm_eps) == (10000.0, None, 1e-6)
    assert (config.tied_embeddings, config.qkv_bias, config.mlp_bias, config.eos_ids) == (
        False,
        False,
        False,
        (),
    )


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(read, key):
    assert read(**{key: "bfloat16"}).dtype == "bfloat16"


def test_rope_under_both_names(read):
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = read(rope_theta=5e5, rope_scaling={**llama3, "rope_type": "llama3"})
    new = read(rope_parameters={**llama3, "rope_type": "llama3", "rope_theta": 5e5})
    assert old == new
    assert old.rope_scaling.kind == "llama3"
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling.factor == 2.0


@pytest.mark.parametrize(
    ("positions", "scaling", "context"),
    [
        (256, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        (1024, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        (320, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        (256, {"rope_type": "yarn", "factor": 4.0}, 1024),
        (1024, {"rope_type": "yarn", "original_max_position_embeddings": 256}, 1024),
        (256, {"rope_type": "linear", "factor": 2.0}, 512),
        (256, {"rope_type": "dynamic", "factor": 2.0}, 256),
        (
            1024,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            1024,
        ),
        (256, None, 256),
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_the_context_that_scaled_positions_reach(read, positions, scaling, context, name):
    config = read(max_position_embeddings=positions, **{name: scaling})
    assert config.max_context == context
    if scaling is not None and scaling.get("rope_type") != "dynamic":
        assert config.rope_scaling.factor in (2.0, 4.0, 8.0)


def test_dynamic_scaling_changes_nothing_within_the_context(read):
    assert read(rope_scaling={"rope_type": "dynamic", "factor": 4.0}) == read()


def test_the_base_inside_the_parameters_counts_first(read):
    assert read(rope_theta=5.0, rope_scaling={"type": "default", "rope_theta": 7.0}).rope_theta == 7
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7
    assert read(rope_theta=5.0).rope_theta == 5
    by_layer = {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}
    assert read(rope_parameters=by_layer).rope_theta == 9


def test_end_tokens_as_int_list_and_from_the_generation_config(read):
    assert read(eos_token_id=7).eos_ids == (7,)
    assert read(eos_token_id=[7, 8]).eos_ids == (7, 8)
    assert read(eos_token_id=7, generation={"eos_token_id": [9, 7]}).eos_ids == (9, 7)


def test_an_end_token_outside_the_vocabulary_is_refused(read):
    assert read(eos_token_id=99).eos_ids == (99,)
    for said in ({"eos_token_id": [7, 100]}, {"generation": {"eos_token_id": 100}}):
        with pytest.raises(ModelError, match="eos_token_id is 100 and the vocabulary has 100 tok"):
            read(**said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture 'MambaForCausalLM' is not supported; allowed: LlamaForCausalLM",
        ),
        ({"architectures": "absent"}, "architecture None"),
        ({"rope_scaling": "linear"}, "not a model's configuration"),
        ({"rope_parameters": [1]}, "not a model's configuration"),
        ({"eos_token_id": 2**70}, "eos_token_id"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings, with its rope scaling, is"),
        ({"hidden_size": "absent"}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights \\(gptq\\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope scaling 'longrope' is not supported; allowed: default, linear, dynamic",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
            "sliding window of 128 tokens",
        ),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window is absent"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
            },
            "sliding window",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
            "sliding window",
        ),
    ],
)
def test_refused(read, changes, message):
    with pytest.raises(ModelError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


_NO_NUMBERS = [float("inf"), float("nan"), 10**400, 1e300, -1, 0, True, "x"]


@pytest.mark.parametrize("value", _NO_NUMBERS)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_what_is_no_finite_number_is_refused(read, key, value):
    with pytest.raises(
        ModelError, match=rf"{key} is .*; it must be a number above 0 and at most 1e\+38"
    ):
        read(**{key: value})


@pytest.mark.parametrize("value", _NO_NUMBERS)
@pytest.mark.parametrize("key", ["factor", "attention_factor", "beta_fast", "beta_slow"])
def test_what_is_no_finite_number_is_refused_of_yarn(read, key, value):
    scaling = {"type": "yarn", "factor": 2.0, key: value}
    with pytest.raises(
        ModelError, match=rf"{key} is .*; it must be a number above 0 and at most 1e\+38"
    ):
        read(rope_scaling=scaling)


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim"])
def test_the_weights_of_yarn_may_be_zero(read, key):
    read(rope_scaling={"type": "yarn", "factor": 2.0, key: 0})
    for value in (-1, float("nan"), "x"):
        with pytest.raises(
            ModelError, match=rf"{key} is .*; it must be a number above 0 and at most 1e\+38"
        ):
            read(rope_scaling={"type": "yarn", "factor": 2.0, key: value})


def test_a_base_that_yarn_cannot_take_the_logarithm_of_is_refused(read):
    with pytest.raises(
        ModelError, match=r"rope_theta is 1\.0; rope scaling yarn needs one above 1"
    ):
        read(rope_theta=1, rope_scaling={"type": "yarn", "factor": 2.0})


@pytest.mark.parametrize("low", [4.0, 5.0])
def test_llama3_bounds_in_the_wrong_order_are_refused(read, low):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low}
    with pytest.raises(ModelError, match=r"low_freq_factor is .* and high_freq_factor is 4\.0"):
        read(rope_scaling={**scaling, "high_freq_factor": 4.0})


def test_windows_that_never_bite_are_accepted(read):
    read(
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=False,
        sliding_window=64,
        num_key_value_heads=2,
    )
    read(architectures=["MistralForCausalLM"], sliding_window=None, num_key_value_heads=2)
    read(architectures=["MistralForCausalLM"], sliding_window=256, num_key_value_heads=2)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b"[" * 100_000])
def test_damaged_file(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)


def test_no_such_directory(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        load_config(tmp_path / "nowhere")
