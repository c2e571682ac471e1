"""Child processes of the JAX side: one, or several under jax.distributed, none of which is left waiting for a dead one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ..olmo_jax.errors import BadInput

POLL_SECONDS = 0.05
LAST_CHARACTERS = 2000  # of a dead child's stderr
# -P: a numpy.py or an olmo_parity/ in the user's working directory is not what the child is meant to import.
PYTHON = (sys.executable, "-P")
ALIVE = "alive"  # a child's file: what it is at
ENDING = ("SIGTERM", "SIGHUP")  # what schedulers and closed terminals send


def end_in_order() -> None:
    """From here on a signal that ends this process lets it clean up first: children and temporary folders would stay."""

    def end(number, _):
        for name in ENDING:
            signal.signal(getattr(signal, name), signal.SIG_IGN)  # a second one would cut the cleaning short
        sys.exit(128 + number)  # what a shell says of a program that a signal ended

    for name in ENDING:
        if signal.getsignal(getattr(signal, name)) == signal.SIG_DFL:  # nohup ignores one on purpose
            signal.signal(getattr(signal, name), end)


def run_children(
    module: str,
    folder: Path,
    request: dict,
    env: dict[str, str],
    what: str,
    patience: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict:
    """Run `python -m module` in request["processes"] processes; returns the answer of process 0.

    folder takes the request, the answers and stderr. The first process that ends badly ends the others too. Raises BadInput
    with its own sentence, or with its last lines under `what`, which names the run. With patience, children that run a
    user's code are ended, and what they started with them, where folder/ALIVE stays unchanged for so many seconds. meanwhile is called again
    and again until they end.
    """
    count = request["processes"]
    (folder / "request.json").write_text(json.dumps(request))
    address = f"127.0.0.1:{_free_port()}" if count > 1 else ""
    children: list[subprocess.Popen] = []
    try:
        for index in range(count):
            with open(_stderr(folder, index), "wb") as stderr:
                command = [*PYTHON, "-m", module, str(folder), str(index), address]
                children.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdout=subprocess.DEVNULL,
                        stderr=stderr,
                        start_new_session=patience is not None,
                    )
                )
        while (codes := [c.poll() for c in children]).count(0) < count and not any(codes):
            if patience is not None:
                _check_alive(folder, what, patience)
            meanwhile()
            time.sleep(POLL_SECONDS)
        meanwhile()
    finally:
        for child in children:
            if patience is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            if child.poll() is None:
                child.kill()
                child.wait()
    answers = [_answer(folder, index) for index in range(count)]
    for answer in answers:
        if "headline" in answer:
            raise BadInput(answer["headline"], answer["faults"])
    # Whoever was killed is the cause; the others may have ended because of it.
    bad = sorted((i for i, code in enumerate(codes) if code), key=lambda i: codes[i] > 0)
    if bad or not answers[0]:
        index = bad[0] if bad else 0
        which = f"process {index} of {count} of {what}" if count > 1 else what
        raise BadInput(f"{which} ended with {_ending(codes[index])}: {_last(folder, index)}")
    return answers[0]


def _check_alive(folder: Path, what: str, patience: float) -> None:
    """Raise BadInput where the children's last sign of life is too old."""
    file = folder / ALIVE
    last = file if file.exists() else folder / "request.json"
    if time.time() - last.stat().st_mtime > patience:
        at = f" at {file.read_text()}" if file.exists() else ""
        raise BadInput(f"{what} hangs: nothing came for {patience:g} seconds{at}")


def serve(run: Callable[[dict, Path, int, str], dict]) -> None:
    """The child's side: run(request, folder, process index, coordinator address), its answer or its faults to a file."""
    folder, index, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    request = json.loads((folder / "request.json").read_text())
    try:
        answer = run(request, folder, index, address)
    except BadInput as error:
        answer = {"headline": error.headline, "faults": list(error.faults)}
    except Exception:
        traceback.print_exc()
        answer = None
    if answer is not None:
        partial = folder / f"answer-{index}.partial"
        partial.write_text(json.dumps(answer))
        partial.rename(folder / f"answer-{index}.json")
    if answer is None or "headline" in answer:
        sys.stderr.flush()
        os._exit(1)  # an orderly exit under jax.distributed would wait for processes that wait for this one


def _answer(folder: Path, index: int) -> dict:
    file = folder / f"answer-{index}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")


def _last(folder: Path, index: int) -> str:
    return _stderr(folder, index).read_text(errors="replace").strip()[-LAST_CHARACTERS:]


def _stderr(folder: Path, index: int) -> Path:
    return folder / f"stderr-{index}.txt"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
