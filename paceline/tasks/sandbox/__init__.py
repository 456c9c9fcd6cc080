"""Running code nobody vouches for. `run.py` is used by tasks; the other files run in the child, by path, on the standard library.

    grader ──stdin: program, tests, nonce──▶ judge ──arguments──▶ player (the candidate's code)
           ◀─────stdout: nonce, verdict─────       ◀──results───

The tests run in the judge and the candidate in the player, which has neither the tests nor the nonce nor the judge's output. All
it can do is to answer calls with plain data; so a verdict cannot be forged from within, whatever the candidate overrides.
"""
