"""A run with workers is led by a process that is part of Ray. If the node that it belongs to is lost, Ray may end this process at
any moment, with exit code 1 and without a word. So on Linux the process of the command only waits for the one that leads the run:
it hands signals on, and if that process ends without an exit code of its own, it says how the run is continued.

The leading process is a fork, which has imported everything already. The waiting one becomes a new, small interpreter."""

from __future__ import annotations

import os
import signal
import sys
import threading

_WAIT = r"""
import os, signal, sys
led, reports, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
signals = {signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCHLD}
while True:
    number = signal.sigwait(signals)  # they have been blocked
    if number != signal.SIGCHLD:
        os.kill(led, signal.SIGSTOP if number == signal.SIGTSTP else number)
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)  # until the shell continues this process
        os.kill(led, signal.SIGCONT)
    ended, status = os.waitpid(led, os.WNOHANG)
    if ended:
        break
code, said = os.waitstatus_to_exitcode(status), os.read(reports, 10)
if said or code == INTERRUPTED:
    sys.exit(int(said or code))
what = (f"signal {-code} has ended the process that leads the run" if code < 0 else
        f"Ray has ended, and with it the process that leads the run (exit code {code})")
cursor = "\x1b[?25h" if os.isatty(2) else ""  # a live view hides it
print(f"{cursor}paceline: {what}; paceline train --resume {out} continues the run", file=sys.stderr)
sys.exit(2)
"""


class Supervisor:
    """Puts the rest of a command into a process of its own, if it is asked to."""

    def __init__(self, interrupted: int) -> None:
        """`interrupted`: exit code of a process that was interrupted twice, and reports nothing any more."""
        self._interrupted = interrupted
        self._report: int | None = None

    def lead_in_own_process(self, out: str) -> None:
        """Continue in a new process, which this one waits for. `out`: the run's folder, by which it is continued.

        Signals of the terminal reach the waiting process only, which hands them on, so that they do not come twice."""
        if sys.platform != "linux":
            return  # elsewhere a process that has imported so much should not be forked
        signals = {signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCHLD}
        reports, report = os.pipe()
        life, alive = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        led = os.fork()
        if led:
            for kept in (reports, alive):
                os.set_inheritable(kept, True)
            script = _WAIT.replace("INTERRUPTED", str(self._interrupted))
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", script, *map(str, (led, reports, alive)), out])
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may write to the terminal all the same
        os.close(reports)
        os.close(alive)
        self._report = report
        threading.Thread(target=_end_with, args=(life,), name="paceline-supervisor", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def end(self, code: int) -> None:
        """Says that the command ends by itself, and its exit code, whatever happens to the process afterwards."""
        if self._report is not None:
            os.write(self._report, str(code).encode())


def _end_with(life: int) -> None:
    """Ends this process at once when the waiting one has ended."""
    os.read(life, 1)
    os.kill(os.getpid(), signal.SIGKILL)
