"""Judges trainers on the ranks that a launcher has started; the first one prints what came out.

torchrun --standalone --nproc-per-node=2 -m tests.kit.judged_on_ranks module:Name clause.id ...
"""

from __future__ import annotations

import json
import sys

from forge_conformance.checks import CHECKS
from forge_conformance.engine import PROFILES, judge
from forge_conformance.lab import Lab
from forge_conformance.subject import Ranks
from forge_conformance.target import resolve

TIME_LIMIT = 20.0


def main(arguments: list[str]) -> None:
    ranks = Ranks.of_this_process(patience=3 * TIME_LIMIT)
    for name, clause_id in zip(arguments[::2], arguments[1::2], strict=True):
        lab = Lab(resolve(name), TIME_LIMIT, ranks=ranks)
        outcome = judge(CHECKS[clause_id], lab, PROFILES["quick"], seed=0)
        lab.close()
        if ranks.first:
            told = {"name": name, "clause_id": clause_id, **outcome.to_dict()}
            print(json.dumps(told), flush=True)
    ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
