"""One commit of a hub repository: which files it has, with their hashes; and a sentence for everything that can go wrong."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..olmo_jax.errors import BadInput
from .hub import HubId, near_revisions

TIMEOUT = 30.0  # seconds for one answer of the hub that holds no file
LIBRARIES = {"httpx", "httpx2", "requests", "urllib3"}  # what releases of huggingface_hub speak HTTP with


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it. One of the hashes is known: sha256 for large files, git's own for small ones."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class Commit:
    """A revision as it was resolved."""

    wanted: HubId
    sha: str
    files: dict[str, HubFile]

    def __str__(self) -> str:
        return f"hf://{self.wanted.repo}@{self.sha}"

    @property
    def revision(self) -> str:
        """Commit and what was asked for, as `hub.revision_of` writes them."""
        return self.sha if self.wanted.revision == self.sha else f"{self.sha} ({self.wanted.revision})"


def resolve(wanted: HubId) -> Commit:
    """Ask the hub which commit a revision is and what lies in it. Raises BadInput."""
    from huggingface_hub import HfApi

    with sentences(wanted, resolved=False):
        info = HfApi().model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=TIMEOUT)
    files = {}
    for listed in info.siblings or []:
        sha256 = listed.lfs["sha256"] if listed.lfs else None
        if listed.size is None:
            raise BadInput(f"the hub at {_endpoint()} lists {listed.rfilename} of {wanted.repo} without its size")
        files[listed.rfilename] = HubFile(listed.rfilename, listed.size, sha256, None if sha256 else listed.blob_id)
    if not re.fullmatch(r"[0-9a-f]{40}", info.sha or ""):
        raise BadInput(f"the hub at {_endpoint()} does not say which commit {wanted} is: found {info.sha!r}")
    return Commit(wanted, info.sha, files)


@contextlib.contextmanager
def sentences(wanted: HubId, resolved: bool = True) -> Iterator[None]:
    """Turn the errors of huggingface_hub and of the network into BadInput. Neither tokens nor signed addresses are shown.

    resolved: the commit is known, so the repository is there, and its name was no local path that is missing.
    """
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        text = _sentence(error, wanted, resolved)
        if text is None:
            raise
        raise BadInput(text) from None


def is_transport(error: BaseException) -> bool:
    """Whether the connection failed, not the hub's answer."""
    if getattr(error, "response", None) is not None:
        return False
    return isinstance(error, ConnectionError) or type(error).__module__.partition(".")[0] in LIBRARIES


def offline() -> bool:
    """Whether the user told huggingface_hub to stay off the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _sentence(error: Exception, wanted: HubId, resolved: bool) -> str | None:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # "not in the cache either": the cause says why it was asked for at all
    repo, where = wanted.repo, _endpoint()
    if isinstance(error, errors.RevisionNotFoundError):
        return _no_revision(wanted)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated: ask for access at {where}/{repo} with the account that your token belongs to{_login()}"
        )
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    said = getattr(error, "server_message", None) or ""
    if isinstance(error, errors.HFValidationError):
        return f"{repo} is no name that a repository can have: {error}"
    if status == 401 and response.headers.get("X-Error-Message", "").startswith("Invalid credentials"):
        return "the hub refused your token: it is wrong or has expired. Log in again (hf auth login), or unset HF_TOKEN"
    no_repository = isinstance(error, errors.RepositoryNotFoundError)
    if status == 404 and (isinstance(error, errors.EntryNotFoundError) or (resolved and not no_repository)):
        return f"{wanted}: a file that the hub lists cannot be had (404): try again later"
    if no_repository or status in (401, 404):
        local = "" if wanted.explicit or resolved else "nothing here has that name either. "
        return (
            f"the hub at {where} has no repository {repo}, or it is private: {local}Is the name right? "
            f"A private one wants a token that may read it{_login()}"
        )
    if status == 403:
        return f"the hub forbids reading {repo} (403{_quoted(said)}): may your token read it?{_login()}"
    if status == 429:
        wait = response.headers.get("Retry-After", "")
        return (
            f"the hub had too many requests from here (429): wait {f'{wait} seconds' if wait.isdigit() else 'a few minutes'} "
            f"and run the same command again; requests with a token have a higher limit{_login()}"
        )
    if status is not None and status >= 500:
        return f"the hub at {where} fails ({status}{_quoted(said)}): run the same command again later"
    if status is not None:
        return f"the hub at {where} answered {status}{_quoted(said)} for {repo}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{wanted} is not in the cache, and HF_HUB_OFFLINE keeps this process off the network: unset it"
    if is_transport(error) or isinstance(error, errors.LocalEntryNotFoundError):
        local = "" if wanted.explicit or resolved else f"{repo} does not exist here, so it was taken for a hub id. "
        return (
            f"{local}The hub at {where} cannot be reached ({type(error).__name__}{_quoted(str(error))}). Is there a network, "
            "a proxy? With HF_HUB_OFFLINE=1 what is in the cache is used"
        )
    return None


def _no_revision(wanted: HubId) -> str:
    text = f"{wanted.repo} has no revision {wanted.revision}"
    try:
        from huggingface_hub import HfApi

        refs = HfApi().list_repo_refs(wanted.repo)
    except Exception:  # the answer without the list is better than none
        return f"{text}. Its revisions could not be listed"
    names = [ref.name for ref in [*refs.branches, *refs.tags]]
    near = near_revisions(wanted.revision, names)
    if near:
        return f"{text} (it has {len(names)}). Near ones: {', '.join(near)}"
    return f"{text}. It has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def _login() -> str:
    from huggingface_hub import get_token

    return "" if get_token() else " (no token was found: HF_TOKEN, or hf auth login)"


def _quoted(text: str) -> str:
    """A server's or library's words: one line, no query strings (they hold signatures), not too long."""
    text = re.sub(r"\?\S+", "?...", " ".join(text.split()))
    return f": {text[:200]}" if text else ""


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT
