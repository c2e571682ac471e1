"""parity.toml: the gate's options for a project, found upwards from the working directory."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..olmo_jax.errors import BadInput
from . import also, gate
from .options import GateOptions

FILE = "parity.toml"
PATH, TEXT, TEXTS, CORE, TABLE = "a path", "text", "a list of text", "core: and a path", "a table"
PATHS, PAIRS = "a list of paths", "a list of [reference, candidate]"
FLAG, COUNT, WHOLE, NUMBER, NUMBERS = (
    "true or false",
    "a whole number above 0",
    "a whole number of at least 0",
    "a number of at least 0",
    "a table of numbers of at least 0",
)
KEYS = {  # as the command line spells them, with _ for -
    "reference":          PATH,
    "candidate":          PATH,
    "also":               CORE,
    "batch":              PATH,
    "only_batch":         FLAG,
    "max_tokens":         COUNT,
    "profile":            TEXT,
    "candidate_fn":       TEXT,
    "gradients":          FLAG,
    "z_loss":             NUMBER,
    "streamed":           FLAG,
    "candidate_device":   TEXT,
    "reference_device":   TEXT,
    "mesh":               TEXT,
    "processes":          COUNT,
    "override":           TEXTS,
    "limits":             NUMBERS,
    "accept_uncovered":   TEXTS,
    "weights_may_differ": FLAG,
    "trace":              FLAG,
    "allow_unknown_key":  TEXTS,
    "json":               PATH,
    "junit":              PATH,
    "markdown":           PATH,
    "html":               PATH,
}  # fmt: skip
# Tables of other commands. The gate leaves them unread, each command checks its own; any other table is an error.
SECTIONS = ("preflight", "heldout")
REPORTS = ("json", "junit", "markdown", "html")


@dataclass(frozen=True)
class Settings:
    """Values by the keys above, and the file they came from; nothing where there is none."""

    file: Path | None
    values: dict
    sections: dict[str, dict] = field(default_factory=dict)  # the other commands' tables, as they stand in the file

    def section(self, name: str, keys: Mapping[str, str]) -> dict:
        """The values of a table, [preflight] or [preflight.recipe] for instance, checked and placed like those of the file.

        keys: kind by name, as KEYS has them. Raises BadInput naming every fault.
        """
        table = self.sections
        for part in name.split("."):
            table = table.get(part, {})
        faults: list[str] = []
        values = _checked(table, keys, self.file.parent, faults) if table else {}
        if faults:
            raise BadInput(f"[{name}] in {self.file} cannot be used", faults)
        return values


@dataclass(frozen=True)
class Choice:
    """Everything that one run of the gate needs."""

    reference: Path
    candidate: Path | None
    reports: dict[str, Path | None]
    options: GateOptions

    @property
    def inputs(self) -> list[Path | None]:
        """Files that no report may overwrite."""
        return [self.reference, self.candidate, self.options.batch, self.options.settings_file]


def choose(given: dict, settings: Settings) -> Choice:
    """The options given on the command line, by the keys above, over those of the file; limits one by one."""
    values = settings.values | given
    values["limits"] = settings.values.get("limits", {}) | limits(given.get("limit", []))
    values.pop("limit", None)
    needed = ("reference",) if values.get("candidate_fn") else ("reference", "candidate")
    lacking = [f"--{name}" for name in needed if name not in values]
    if lacking:
        where = f"in {settings.file}" if settings.file else f"in a {FILE} here or above"
        raise BadInput(f"{' and '.join(lacking)} is wanted, as an option or {where} (olmo-parity --help)")
    reports = {name: values.pop(name, None) for name in REPORTS}
    reference, candidate, options = sides_and_options(values, settings.file)
    return Choice(reference, candidate, reports, options)


def sides_and_options(values: dict, file: Path | None) -> tuple[Path | None, Path | None, GateOptions]:
    """Reference, candidate and the gate's options out of values by the keys above, reports taken out. file: the parity.toml."""
    values = dict(values)
    check_limits(values.get("profile", gate.DEFAULT.name), values.get("limits", {}))
    reference, candidate = values.pop("reference", None), values.pop("candidate", None)
    if "allow_unknown_key" in values:
        values["allow_unknown_keys"] = values.pop("allow_unknown_key")
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return reference, candidate, GateOptions(**options, settings_file=file)


def check_limits(profile: str, by_name: dict[str, float]) -> None:
    """Raise BadInput where the gate has no such profile or limit."""
    _known("profile", [profile], gate.PROFILES)
    _known("limit", by_name, gate.LIMIT_NAMES)


def _known(kind: str, names, known) -> None:
    for name in names:
        if name not in known:
            raise BadInput(f"unknown {kind} {name!r}: was {_nearest(name, known)!r} meant? Known: {', '.join(known)}")


def limits(pairs: list[str]) -> dict[str, float]:
    """--limit NAME=VALUE, by name."""
    found = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = None
        if not _is_limit(found[name]):
            raise BadInput(f"--limit {pair}: NAME=VALUE is wanted, with a finite VALUE of at least 0")
    return found


def load(config: Path | None, no_config: bool) -> Settings:
    """Read the named file, or the nearest parity.toml at or above the working directory, or none.

    Relative paths become relative to the file. Raises BadInput naming every unknown key, with the nearest known one, and
    every value of a wrong kind.
    """
    if no_config and config is not None:
        raise BadInput("--config and --no-config exclude each other")
    if no_config:
        return Settings(None, {})
    file = config if config is not None else find(Path.cwd())
    if file is None:
        return Settings(None, {})
    file = file.absolute()
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--config {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not UTF-8 text: byte {error.start} cannot be read") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{file} is not TOML: {error}") from None
    faults: list[str] = []
    values = _checked(raw, KEYS | dict.fromkeys(SECTIONS, TABLE), file.parent, faults)
    if faults:
        raise BadInput(f"{file} cannot be used", faults)
    sections = {name: values.pop(name) for name in SECTIONS if name in values}
    return Settings(file, values, sections)


def _checked(table: dict, keys: Mapping[str, str], folder: Path, faults: list[str]) -> dict:
    """The values of a table that fit, placed; the others are noted in faults."""
    values = {}
    for key, value in table.items():
        if key not in keys:
            faults.append(f"unknown key {key!r}: was {_nearest(key.replace('-', '_'), keys)!r} meant?")
        elif not _fits(value, keys[key]):
            faults.append(f"{key} is {value!r}, {keys[key]} is wanted")
        else:
            values[key] = _placed(folder, value, keys[key])
    return values


def find(folder: Path) -> Path | None:
    """The nearest parity.toml at or above a folder."""
    return next((f / FILE for f in (folder, *folder.parents) if (f / FILE).is_file()), None)


def _nearest(name: str, known) -> str:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0)[0]


def _fits(value, kind: str) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == CORE:
        return isinstance(value, str) and value.startswith(also.KIND) and value != also.KIND
    if kind in (PATH, TEXT):
        return isinstance(value, str) and bool(value)
    if kind == FLAG:
        return isinstance(value, bool)
    if kind in (COUNT, WHOLE):
        return number and isinstance(value, int) and value >= (kind == COUNT)
    if kind == NUMBER:
        return _is_limit(value)
    if kind == TABLE:
        return isinstance(value, dict)
    if kind == PAIRS:
        return isinstance(value, list) and all(_fits(v, TEXTS) and len(v) == 2 for v in value)
    if kind in (TEXTS, PATHS):
        return isinstance(value, list) and all(isinstance(v, str) and v for v in value)
    return isinstance(value, dict) and all(_is_limit(v) for v in value.values())


def _is_limit(value) -> bool:
    # inf would never fail and nan never pass: neither is a limit
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _placed(folder: Path, value, kind: str):
    """A value whose path, if it holds one, is relative to the file's folder."""
    if kind == CORE:
        return f"{also.KIND}{_at(folder, value.removeprefix(also.KIND))}"
    if kind in (PATHS, PAIRS):
        return [_placed(folder, v, PATH if kind == PATHS else PATHS) for v in value]
    return _at(folder, value) if kind == PATH else value


def _at(folder: Path, value: str) -> Path | str:
    """A path relative to the file; an address such as gs://bucket/run/0 as it is."""
    return value if "://" in value else folder / Path(value).expanduser()
