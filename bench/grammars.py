"""What a grammar costs a decode step: four sequences with and without one, in turn, on one server.

python bench/grammars.py demo --rounds 7
"""

import argparse
import json
import statistics
import time

from forebay import LLM, SamplingParams
from forebay.core.sampling import Grammar, GrammarKind

SEQUENCES = 4
TOKENS = 96
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 50}  # no output ends before its limit


def step_ms(llm: LLM, grammar: Grammar | None, seed: int) -> float:
    params = SamplingParams(
        max_tokens=TOKENS, temperature=0.8, seed=seed, ignore_eos=True, grammar=grammar
    )
    prompts = [f"{number}: people, as JSON:\n" for number in range(SEQUENCES)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)
    return seconds / TOKENS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    with LLM(asked.model, store="none") as llm:
        for warm in (None, grammar):
            step_ms(llm, warm, 0)
        pairs = [
            (step_ms(llm, None, seed), step_ms(llm, grammar, seed))
            for seed in range(1, asked.rounds + 1)
        ]
    free = [pair[0] for pair in pairs]
    bound = [pair[1] for pair in pairs]
    ratios = sorted(second / first for first, second in pairs)
    print(f"free  {statistics.median(free):.2f} ms a step ({min(free):.2f} to {max(free):.2f})")
    print(f"bound {statistics.median(bound):.2f} ms a step ({min(bound):.2f} to {max(bound):.2f})")
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
