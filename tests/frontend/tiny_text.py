"""A tiny model directory. Every byte is a token, so that any text can be scripted exactly; weights, where asked for, are random."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 256
CONTEXT = 512
WIDTH = 16
LAYERS = 4
VOCABULARY = 300  # wider than the tokenizer's, as models are

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if messages[0].content == 'refuse me' %}{{ raise_exception('no such talk') }}{% endif %}"
)


def write_text_model(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    alphabet = byte_alphabet()
    tokenizer = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert tokenizer.token_to_id("<end>") == EOS
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE})
    )
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": WIDTH,
                "intermediate_size": WIDTH,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 2,
                "tie_word_embeddings": True,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": CONTEXT,
                "eos_token_id": EOS,
            }
        )
    )
    return path


def byte_alphabet() -> list[str]:
    """The printable stand-in of every byte in byte-level BPE (GPT-2's `bytes_to_unicode`), by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]


def write_random_weights(path: Path) -> Path:
    """Makes a model that the real engine runs, whose text is noise."""
    random = np.random.default_rng(11)
    square = {
        name: (WIDTH, WIDTH)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    }
    square |= {name: (WIDTH, WIDTH) for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    tensors = {
        "model.embed_tokens.weight": random.normal(size=(VOCABULARY, WIDTH)),
        "model.norm.weight": np.ones(WIDTH),
    }
    for layer in range(LAYERS):
        for name, shape in square.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = random.normal(size=shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(WIDTH)
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
        path / "model.safetensors",
    )
    return path
