"""What a user sees, whole: of a conformant trainer, and of a broken one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

CONFORMANT = """\
============================= test session starts ==============================
conformance: tiny:Trainer, 20 clauses, profile default, seed 0
collected 20 items

status ...                                                               [ 15%]
forward ........                                                         [ 55%]
optim_step ..n..nn..                                                     [100%]

========================= conformance of tiny:Trainer ==========================
  MUST                held  broke  not checked  SHOULD held
  status                 3      -            -
  forward                8      -            -
  optim_step             5      -            3       1 of 1
  all                   16      -            3       1 of 1

not checked:
  optim_step.lr_used: no torch optimizer steps in this process: declare
      Target.learning_rate, a function from the number of the update to its rate
  optim_step.update_rule: the optimizer isn't declared: declare
      Target.optimizer, a function from float64 parameters by name to a torch
      optimizer
  optim_step.clip_once: whether and how it clips isn't declared: declare
      Target.clip_norm, the 2-norm that gradients are clipped to (math.inf for
      none)

CONFORMANT in what was selected: 16 of 19 MUST held, 3 not checked; 1 of 1
  SHOULD held
17 passed, 3 not checked"""

BROKEN = """\
============================= test session starts ==============================
conformance: broken:SeesLater, 8 clauses, profile default, seed 0
collected 8 items

forward ....F...                                                         [100%]

=================================== FAILURES ===================================
____________________________ forward.causal (MUST) _____________________________
A conforming trainer gives logits at position t that don't depend on tokens
after t.

  expected        logits before position 1 don't change with the tokens from
                  there on
  seen            1.98958731 where it is 0.961246252 (worst of 16, at [0, 0,
                  14])
  apart           relative distance 0.311; allowed 1e-06 (relative: 3 times
                  the error of a plain transformer's logits in float32 (1e-07)
                  plus 4 units in the last place)
  smallest input  change.ids = [[14, 13]]
                  change.changed_ids = [[14, 14]]
                  change.position = 1
  where to look   Is the attention mask causal on every path of `forward` (fused
                  and plain attention, short and long sequences, with a mask
                  given and without)? Does anything else mix positions, such as
                  a mean over the sequence?
  again           pytest --trainer=broken:SeesLater --clause=forward.causal

======================= conformance of broken:SeesLater ========================
  MUST                held  broke  not checked  SHOULD held
  forward                7      1            -

broke:
  forward.causal: expected logits before position 1 don't change with the tokens
      from there on; seen 1.98958731 where it is 0.961246252 (worst of 16, at
      [0, 0, 14])

NOT CONFORMANT: 7 of 8 MUST held, 1 broke
1 failed, 7 passed"""


def screen(result):
    """The output without what differs between machines: versions, times, rounding."""
    machine = ("platform ", "rootdir: ", "plugins: ", "asyncio: ")
    text = "\n".join(line.rstrip() for line in result.outlines if not line.startswith(machine))
    text = re.sub(r"\d\.\de-", "1e-", text)
    return re.sub(r"=+ (.*) in [\d.]+s =+", r"\1", text)


def test_a_conformant_trainer(run):
    clauses = ["--clause=status", "--clause=forward", "--clause=optim_step"]
    assert screen(run("--trainer=tiny:Trainer", *clauses)) == CONFORMANT


def test_a_broken_trainer(run, pytester):
    shutil.copy(Path(__file__).with_name("broken.py"), pytester.path)
    assert screen(run("--trainer=broken:SeesLater", "--clause=forward")) == BROKEN
