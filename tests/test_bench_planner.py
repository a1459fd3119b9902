"""The planner's bench measures what it says: its own assertions hold the plans to their shape."""

from forebay.bench import planner


def test_there_is_a_row_for_each_context_and_one_for_the_match(monkeypatch) -> None:
    for name, value in {
        "CONTEXTS": (256, 1024),
        "STEPS": 5,
        "WARM_STEPS": 2,
        "MATCH_TOKENS": 2048,
        "MATCH_TIMES": 3,
    }.items():
        monkeypatch.setattr(planner, name, value)
    rows = planner.run(lambda line: None)["rows"]
    assert [(row["what"], row["tokens"], row["samples"]) for row in rows] == [
        ("step", 256, 5),
        ("step", 1024, 5),
        ("match", 2048, 3),
    ]
    assert all(row["p50"] > 0 and row["p99"] > 0 for row in rows)
