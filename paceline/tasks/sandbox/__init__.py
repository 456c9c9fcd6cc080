"""Running code that nobody vouches for. `run.py` and `service.py` are used by tasks; `policy.py` says whether they may run where
the system cannot isolate them. The other files run in the child processes, which are started by path and import the standard
library only (`scorer.py` also the scoring libraries). What holds these processes: `cage.py` (with `rootfs.py`, `syscalls.py`
and `landlock.py`) by the kernel, `guard.py` by Python.

`run.py`: a candidate's code against tests.

grader ──stdin: program, tests, nonce──▶ judge ──arguments──▶ player (the candidate's code) ◀─────stdout: nonce, verdict─────
◀──results───

The tests run in the judge and the candidate in the player, which has neither the tests nor the nonce nor the judge's output. All
it can do is to answer calls with plain data; so a verdict cannot be forged from within, whatever the candidate overrides.

`service.py`: answers that a scoring library evaluates, in a server (`scorer.py`) that is kept for many answers. Here the
scoring library and the answer are in one process, so the graders check before that the answer is an expression and nothing
else.
"""
