"""Why a process ends, as seen by real interpreters that end."""

from __future__ import annotations

import builtins
import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import textwrap

import pytest

from coordd.daemon import process_exit
from coordd.daemon.process_exit import ExitWatch

PRELUDE = """
import atexit, sys, threading
from coordd.daemon.process_exit import ExitWatch
watch = ExitWatch(lambda reason, trace, error: print("told:", reason, "|", trace.splitlines()[-1].strip(), "|", error))
atexit.register(watch.verdict)
"""

ENDS = {
    "an uncaught exception": (
        "raise KeyError('lost')",
        1,
        "told: failed: KeyError: 'lost' | KeyError: 'lost' | 'lost'",
    ),
    "sys.exit(3)": ("sys.exit(3)", 3, "told: called sys.exit(3) at SCRIPT, exit code 3 | sys.exit(3) | None"),
    "sys.exit with a text": (
        "sys.exit('why')",
        1,
        "told: called sys.exit('why') at SCRIPT, exit code 1 | sys.exit('why') | None",
    ),
    "sys.exit deep inside": (
        "def main():\n    try:\n        sys.exit(4)\n    finally:\n        sum([1])\nmain()",
        4,
        "told: called sys.exit(4) at SCRIPT, exit code 4 | sys.exit(4) | None",
    ),
    "sys.exit by name": (
        "from sys import exit as leave\nleave(5)",
        5,
        "told: called sys.exit(5) at SCRIPT, exit code 5 | ",
    ),
    "exit(3)": ("exit(3)", 3, "told: called sys.exit(3) at SCRIPT, exit code 3 | exit(3) | None"),
    "quit": ("quit('why')", 1, "told: called sys.exit('why') at SCRIPT, exit code 1 | quit('why') | None"),
    "an uncaught exception under another hook": (
        "sys.excepthook = lambda *story: None\nraise KeyError('lost')",
        1,
        "told: failed: KeyError: 'lost' | KeyError: 'lost' | 'lost'",
    ),
    "an uncaught exception under another hook, through a finally": (
        "sys.excepthook = lambda *story: None\ntry:\n    raise KeyError('lost')\nfinally:\n    sum([1])",
        1,
        "told: failed: KeyError: 'lost' | KeyError: 'lost' | 'lost'",
    ),
    "an uncaught exception under another hook, through a with": (
        "import tempfile\nsys.excepthook = print\nwith tempfile.TemporaryFile():\n    raise KeyError('lost')",
        1,
        "<class 'KeyError'> 'lost'",
    ),
    "an uncaught exception after one that was caught and kept": (
        """
def look():
    try:
        1 / 0
    except ZeroDivisionError as error:
        sys.last_value = error
look()
raise KeyError('lost')
""",
        1,
        "told: failed: KeyError: 'lost' | KeyError: 'lost' | 'lost'",
    ),
    "an uncaught exception under a hook that is an object": (
        """
class Hook:
    def __init__(self, below):
        self.below = below
    def __call__(self, *story):
        self.below(*story)
sys.excepthook = Hook(sys.excepthook)
raise KeyError('lost')
""",
        1,
        "told: failed: KeyError: 'lost' | KeyError: 'lost' | 'lost'",
    ),
    "an uncaught exception under a hook with arguments of its own": (
        """
import functools
sys.excepthook = functools.partial(lambda below, *story: below(*story), sys.excepthook)
raise KeyError('lost')
""",
        1,
        "told: failed: KeyError: 'lost' | KeyError: 'lost' | 'lost'",
    ),
    "an uncaught exception after a session in the script": (
        """
import code
class Console(code.InteractiveConsole):
    lines = iter(['1 / 0'])
    def raw_input(self, prompt=''):
        for line in self.lines:
            return line
        raise EOFError
Console().interact('', '')
raise KeyError('lost')
""",
        1,
        "told: failed: KeyError: 'lost' | KeyError: 'lost' | 'lost'",
    ),
    "sys.exit while handling": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.exit(6)",
        6,
        "told: called sys.exit(6) at SCRIPT, exit code 6 | sys.exit(6) | None",
    ),
    "sys.exit in Python's own library": (
        "import argparse\nargparse.ArgumentParser(usage='').parse_args(['--nope'])",
        2,
        "told: called sys.exit(2) at SCRIPT, exit code 2 | ",
    ),
    "Ctrl-C": ("raise KeyboardInterrupt", None, "told: failed: KeyboardInterrupt | KeyboardInterrupt | "),
}

QUIET = {
    "the end": ("", 0),
    "sys.exit()": ("sys.exit()", 0),
    "sys.exit(0)": ("sys.exit(0)", 0),
    "sys.exit(False)": ("sys.exit(False)", 0),
    "a caught exit": ("try:\n    sys.exit(3)\nexcept SystemExit as error:\n    assert error.code == 3", 0),
    "a kept exit": ("try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error", 0),
    "an error that was looked at": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    sys.last_value = error",
        0,
    ),
    "an exit of a thread": ("thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()", 0),
    "an error of a thread": ("thread = threading.Thread(target=int, args=('x',)); thread.start(); thread.join()", 0),
}


SHELL = """
class Shell:
    def excepthook(self, *story):
        self.show()
    def run_cell(self, text):
        before, sys.excepthook = sys.excepthook, self.excepthook
        try:
            exec(compile(text, "<ipython-input-1-abc>", "exec"), vars(sys.modules["__main__"]))
        except BaseException:
            self.show()
        finally:
            sys.excepthook = before
    def show(self):
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.last_exc = sys.last_value
"""
"""As IPython's, which a notebook's kernel has, too."""

SESSIONS = {
    "a notebook": SHELL
    + """
sys.excepthook = lambda *story: None  # the kernel's
shell = Shell()
for cell in ("import coordd", "lost", "1 / 0", "print('on')"):
    shell.run_cell(cell)
""",
    "a notebook whose first cell sets the hook": SHELL
    + """
shell = Shell()
shell.run_cell("watch = ExitWatch(lambda *story: print('told:', story)); atexit.register(watch.verdict)")
shell.run_cell("lost")
shell.run_cell("print('on')")
""",
    "a notebook that is left by sys.exit()": SHELL
    + """
sys.excepthook = lambda *story: None
Shell().run_cell("lost")
print("on")
sys.exit(0)
""",
    "a console": """
import code
console = code.InteractiveConsole()
for line in ("lost", "1 / 0", "print('on')"):
    console.push(line)
""",
    "a console under another hook": """
import code
sys.excepthook = lambda *story: None
console = code.InteractiveConsole()
for line in ("lost", "1 / 0", "print('on')"):
    console.push(line)
""",
    "code that shows errors by the hook, and goes on": """
def main():
    try:
        lost
    except NameError:
        sys.excepthook(*sys.exc_info())
    print("on")
main()
""",
    "code that does so in another thread": """
def main():
    try:
        lost
    except NameError:
        sys.excepthook(*sys.exc_info())
thread = threading.Thread(target=main)
thread.start()
thread.join()
print("on")
""",
    "a debugger's errors": """
sys.excepthook = lambda *story: None
try:
    lost
except NameError as error:
    sys.last_exc = sys.last_value = error
print("on")
""",
}


@pytest.mark.parametrize("session", SESSIONS)
def test_an_error_after_which_a_session_goes_on_is_no_failure(session):
    assert run(SESSIONS[session]) == (0, "on\n")


TYPED = "lost\n\ntry:\n    1 / 0\nfinally:\n    pass\n\nprint('o' + 'n')\n"


@pytest.mark.parametrize(
    ("options", "text", "code"),
    [
        (["-i", "-c", PRELUDE], TYPED, 0),
        (["-i", "-c", PRELUDE + "lost"], TYPED, 0),
        (["-i", "-c", PRELUDE + "sys.exit(4)"], TYPED, 0),
        (["-i"], f"exec({PRELUDE!r})\n{TYPED}", 0),
    ],
    ids=["-i", "-i after an error", "-i after an exit", "-i from the beginning"],
)
def test_errors_in_an_interactive_interpreter_are_no_failures(options, text, code):
    done = subprocess.run(
        [sys.executable, *options], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, "on\n")


def test_leaving_an_interactive_interpreter_with_an_exit_code_is_a_failure():
    done = subprocess.run(
        [sys.executable, "-i", "-c", PRELUDE],
        input="lost\nexit(3)\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert done.stdout.startswith("told: called sys.exit(3) at <stdin>:1, exit code 3")


@pytest.mark.parametrize("last", ["exit()\n", "exit(3)\n"], ids=["the end", "an exit code"])
def test_errors_at_a_terminal_are_no_failures(last, tmp_path):
    script = tmp_path / "prelude.py"
    script.write_text(PRELUDE)
    code, text = at_terminal([sys.executable], f"exec(open({str(script)!r}).read())\n{TYPED}", last)
    assert "\non\r" in text
    failed = "3" in last
    assert ("told:" in text, code) == (failed, 3 if failed else 0)


def at_terminal(command: list[str], typed: str, last: str) -> tuple[int, str]:
    """Runs a command at a terminal of its own; returns its exit code, and what is seen there.

    What is typed ``last`` comes when the output says ``on``.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "dumb"  # so that no editor of lines draws anything
        os.execv(command[0], command)  # noqa: S606 - it is this interpreter
    os.write(terminal, typed.encode())
    seen = b""
    with contextlib.suppress(OSError):  # the terminal is gone
        while select.select([terminal], [], [], 30.0)[0] and (part := os.read(terminal, 4096)):
            told, seen = b"\non\r" in seen, seen + part
            if not told and b"\non\r" in seen:
                os.write(terminal, last.encode())
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seen.decode()


def run(script: str) -> tuple[int, str]:
    text = PRELUDE + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("end", ENDS)
def test_failing_ends_are_told_and_keep_their_exit_code(end, tmp_path):
    script, code, told = ENDS[end]
    file = tmp_path / "script.py"
    file.write_text(PRELUDE + script)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert code in {done.returncode, None}, done.stderr  # after Ctrl-C it depends on the version of Python
    assert re.sub(rf"{file}:\d+", "SCRIPT", done.stdout).startswith(told)


@pytest.mark.parametrize(
    "end",
    ["sys.exit(3)", "sys.excepthook = lambda *story: None; raise KeyError('lost')"],
    ids=["an exit", "another hook"],
)
@pytest.mark.parametrize(
    "busy",
    ["atexit.register(print, 'busy')", "threading.Timer(0.2, print, ['busy']).start()"],
    ids=["a handler", "a thread"],
)
def test_failing_ends_are_told_before_what_python_waits_for(end, busy):
    """Handlers and threads may take minutes, such as for an upload; other ranks must not wait as long."""
    _, printed = run(f"{busy}\n{end}")
    told, *rest = printed.splitlines()
    assert told.startswith("told: ")
    assert rest == ["busy"]


@pytest.mark.parametrize("end", QUIET)
def test_other_ends_are_nobodys_business(end):
    script, code = QUIET[end]
    assert run(script) == (code, "")


def test_an_exit_of_a_thread_is_printed_no_more_than_without_coordd():
    script = (
        f"{PRELUDE}for code in (0, 3):\n    thread = threading.Thread(target=sys.exit, args=(code,)); thread.start()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_exit_code_can_be_insisted_on_after_everything_else_has_been_done():
    """By whoever is set up first: what was registered before is not waited for."""
    done = run("atexit.register(lambda: watch.insist(4)); atexit.register(print, 'first'); print('last', end='')")
    assert done == (4, "lastfirst\n")


def test_a_hook_on_top_that_calls_the_one_below_is_told_once():
    script = "below = sys.excepthook\nsys.excepthook = lambda *story: below(*story)\nraise KeyError('lost')"
    code, text = run(script)
    assert (code, text.count("told:")) == (1, 1)


BRIEF = """
watch = ExitWatch(lambda *_: None, lambda error: f"in brief: {error}\\n" * isinstance(error, KeyError))
"""
BRIEFED = {
    "few words are said in place of a traceback": ("raise KeyError('lost')", "in brief: 'lost'"),
    "no words are a traceback": ("raise ValueError('bad')", "ValueError: bad"),
    "another hook is asked all the same": ("raise KeyError('lost')", "hooked KeyError"),
}


@pytest.mark.parametrize("case", BRIEFED)
def test_in_brief(case):
    script, last = BRIEFED[case]
    hook = "sys.excepthook = lambda kind, *_: print('hooked', kind.__name__, file=sys.stderr)\n" * ("hooked" in last)
    text = f"import sys\nfrom coordd.daemon.process_exit import ExitWatch\n{hook}{BRIEF}{script}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == last
    assert ("Traceback" in done.stderr) == ("ValueError" in last)


def test_a_debugger_finds_the_error_after_it():
    look = """
    def look():
        error, trace = sys.last_value, sys.last_traceback
        assert getattr(sys, "last_exc", error) is error and trace is error.__traceback__ and sys.last_type is KeyError
        print("found", trace.tb_next.tb_frame.f_locals["here"])
    atexit.register(look)
    def lose(here):
        raise KeyError
    lose(7)
    """
    code, text = run(look)
    assert (code, text.splitlines()[-1]) == (1, "found 7")


@pytest.mark.usefixtures("hooks")
def test_the_whole_story_of_an_error_is_kept(monkeypatch):
    monkeypatch.setattr(process_exit, "is_called_by", lambda _: True)
    watch = ExitWatch(lambda *_: None)
    monkeypatch.setattr(watch, "_excepthook", lambda *_: None)
    assert not watch.story
    error = KeyError("lost")
    error.__cause__ = ValueError("two  spaces")
    sys.excepthook(KeyError, error, None)
    assert watch.story.splitlines()[0] == watch.told == "failed: KeyError: 'lost'"
    assert "\nValueError: two  spaces\n" in watch.story


@pytest.fixture
def hooks(monkeypatch):
    """Puts this interpreter's hooks back afterwards."""
    for module, name in ((sys, "excepthook"), (sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        monkeypatch.setattr(module, name, getattr(module, name, None), raising=False)


@pytest.mark.usefixtures("hooks")
def test_an_error_with_a_huge_text_is_told_in_part(monkeypatch):
    monkeypatch.setattr(process_exit, "is_called_by", lambda _: True)
    told = []
    watch = ExitWatch(lambda *story: told.append(story))
    monkeypatch.setattr(watch, "_excepthook", lambda *_: None)
    error = ValueError("x" * 50_000_000)
    sys.excepthook(ValueError, error, None)
    ((reason, text, found),) = told
    assert reason.startswith("failed: ValueError: xxx")
    assert len(reason) + len(text) < 100_000
    assert found is error


@pytest.mark.usefixtures("hooks")
def test_the_hook_of_others_is_called():
    called = []
    sys.excepthook = lambda *story: called.append(story)
    ExitWatch(lambda *_: None)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert len(called) == 1


HEARD = """
import os, signal
watch = ExitWatch(lambda *story: print("told:", *story, flush=True))
watch.hear_sigterm()
"""

MINE = "signal.signal(signal.SIGTERM, lambda *_: print('mine'))"

SIGTERMS = {
    "ends the process with the signal's name": (
        "signal.raise_signal(signal.SIGTERM); print('too late')",
        "told: was ended by SIGTERM  None\n",
        -15,
    ),
    "is told once": (
        """
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        watch.forget_sigterm()
        watch = ExitWatch(lambda *story: [signal.setitimer(signal.ITIMER_REAL, 0.01), print("told", flush=True)])
        watch.hear_sigterm()
        signal.raise_signal(signal.SIGTERM)
        """,
        "told\n",
        -15,
    ),
    "stays what somebody has made of it before": (
        f"watch.forget_sigterm(); {MINE}; watch.hear_sigterm(); signal.raise_signal(signal.SIGTERM)",
        "mine\n",
        0,
    ),
    "becomes what somebody makes of it later": (
        f"{MINE}; watch.forget_sigterm(); signal.raise_signal(signal.SIGTERM)",
        "mine\n",
        0,
    ),
    "may be nobody's business after all": (
        "watch.forget_sigterm(); signal.raise_signal(signal.SIGTERM)",
        "",
        -15,
    ),
    "is not told by forked children": (
        """
        number = os.fork()
        if number == 0:
            signal.raise_signal(signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
        """,
        "-15\n",
        0,
    ),
    "ends forked children that have only just begun": (
        """
        import multiprocessing
        context, survivors = multiprocessing.get_context("fork"), 0
        for _ in range(15):
            child = context.Process(target=threading.Event().wait, args=(30,))
            child.start()
            child.terminate()
            child.join(5)
            survivors += child.exitcode is None
            child.kill()
        print(survivors, signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """,
        "0 False\n",
        0,
    ),
    "may be only noted": (
        """
        print(watch.heed_sigterm(), watch.asked)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        print(watch.asked)
        """,
        "True False\nTrue\n",
        0,
    ),
    "cannot be noted if it is somebody else's": (
        f"{MINE}; print(watch.heed_sigterm()); signal.raise_signal(signal.SIGTERM); print(watch.asked)",
        "False\nmine\nFalse\n",
        0,
    ),
    "is not noted any more by who has forgotten it": (
        """
        watch.heed_sigterm()
        watch.forget_sigterm()
        watch.hear_sigterm()
        signal.raise_signal(signal.SIGTERM)
        """,
        "told: was ended by SIGTERM  None\n",
        -15,
    ),
    "is left alone by other threads": (
        """
        watch.forget_sigterm()
        thread = threading.Thread(target=watch.hear_sigterm)
        thread.start()
        thread.join()
        print(signal.getsignal(signal.SIGTERM).name)
        """,
        "SIG_DFL\n",
        0,
    ),
}


@pytest.mark.parametrize("case", SIGTERMS)
def test_sigterm(case):
    script, told, code = SIGTERMS[case]
    assert run(HEARD + textwrap.dedent(script)) == (code, told)
