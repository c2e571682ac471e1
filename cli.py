"""Two Typer apps, no logic, no torch or jax at import time."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from .olmo_jax.errors import BadInput

SETTINGS = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
convert_app = typer.Typer(help="Convert OLMo 3 checkpoints between PyTorch and Orbax/JAX.", **SETTINGS)
parity_app = typer.Typer(help="Prove that two frameworks compute the same function.", **SETTINGS)


def convert_main() -> NoReturn:
    """Entry point of olmo-convert."""
    _run(convert_app)


def parity_main() -> NoReturn:
    """Entry point of olmo-parity."""
    _run(parity_app)


def _run(app: typer.Typer) -> NoReturn:
    """Run an app so that bad input ends in a sentence and exit code 2, never in a traceback.

    Exit code 1 is kept for "the two sides differ": a crash must not read as that.
    """
    try:
        app(standalone_mode=True)
    except BadInput as error:
        sys.exit(_fail(str(error)))
    except OSError as error:
        sys.exit(_fail(f"{error.filename or 'the file system'}: {error.strerror or error}"))
    sys.exit(0)


def _fail(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2
