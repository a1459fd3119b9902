"""`python -m tests.scenarios [--rewrite]`: compare all scenarios with what happens now, or write down what happens now."""

import argparse

from tests.scenarios.script import rewrite, scripts
from tests.scenarios.stages import new_stage


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="write the effects anew; read the difference before you commit it",
    )
    wanted = parser.parse_args().rewrite
    changed = 0
    for path in scripts():
        before = path.read_text()
        after = rewrite(before, new_stage)
        if after != before:
            changed += 1
            print(f"{path.name}: {'rewritten' if wanted else 'differs'}")
            if wanted:
                path.write_text(after)
    print(f"{len(scripts())} scenarios, {changed} changed")
    return int(bool(changed) and not wanted)


if __name__ == "__main__":
    raise SystemExit(main())
