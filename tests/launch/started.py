"""A `coordd run` that was started for a test, with everything below it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.scaled_timeout import ScaledTimeout

__all__ = ["FOR_EVER", "PATIENCE", "ROOT", "Started", "alive", "wait_until"]

ROOT = Path(__file__).resolve().parents[2]
FOR_EVER = "import time; all(time.sleep(0.02) is None for _ in iter(int, 1))"
"""Waits for signals that a handler takes; `signal.pause` would sleep on after one that comes just before it."""
PATIENCE = 30.0  # seconds after which a test has failed


def alive(process: psutil.Process) -> bool:
    """A zombie is dead: whether its parent has noticed is not our affair."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds=PATIENCE):
    """Waits for something that nobody tells us about; returns whether it came true in time."""
    selector = selectors.DefaultSelector()
    limit = ScaledTimeout(seconds)
    while not (true := condition()) and limit.next_wait():
        selector.select(0.01)
    return true


class Started:
    """Starts ``coordd run …`` in a session of its own, so that a test's signals reach nothing else."""

    def __init__(self, *arguments, **variables):
        command = [sys.executable, "-m", "coordd.launch.cli", "run", *map(str, arguments)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._text = {self.process.stdout: b"", self.process.stderr: b""}
        self._selector = selectors.DefaultSelector()
        for file in self._text:
            os.set_blocking(file.fileno(), False)
            self._selector.register(file, selectors.EVENT_READ)
        self._below = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Leaves nothing behind, whatever the test saw."""
        self.note()
        for process in [*self._below, self.process]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(PATIENCE)
        for file in self._text:
            file.close()

    @property
    def out(self):
        return self._text[self.process.stdout].decode()

    @property
    def err(self):
        return self._text[self.process.stderr].decode()

    @property
    def last(self):
        """The last line of all."""
        return self.err.splitlines()[-1]

    def wait_for(self, condition):
        """Reads output until the condition holds; remembers all processes that are there then."""
        limit = ScaledTimeout(PATIENCE)
        while not condition(self) and self._selector.get_map():
            assert limit.next_wait(), f"waited in vain\n{self.out}\n{self.err}"
            for key, _ in self._selector.select(0.1):
                chunk = key.fileobj.read()
                self._text[key.fileobj] += chunk or b""
                if not chunk:
                    self._selector.unregister(key.fileobj)
        self.note()
        return self

    def wait_for_ranks(self, count):
        """Waits until each rank has said that it is ready."""
        return self.wait_for(lambda job: job.out.count("ready") >= count)

    def wait(self):
        """Waits for the end; returns the exit code as a shell has it."""
        self.wait_for(lambda _: False)
        code = self.process.wait(PATIENCE)
        return code if code >= 0 else 128 - code

    def note(self):
        """Remembers every process that is below now."""
        try:
            self._below += psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return

    def send(self, number=signal.SIGINT):
        self.process.send_signal(number)

    @property
    def left(self):
        """What is still there of all that was started."""
        return [process for process in self._below if alive(process)]
