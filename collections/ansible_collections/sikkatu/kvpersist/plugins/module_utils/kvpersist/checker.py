"""Are the pins what the serving image makes of the model? Asked once per image, model and arguments."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from typing import Any, Dict, List, Mapping, Sequence

from . import weights
from .identity import IdentityError, check_field

RESOLVER = "/usr/lib/kvpersist/resolve-identity"
CONTAINER = "kvpersist-identity-check"
CACHE_FILE = "/var/cache/kvpersist-identity/resolved.json"
#: Answers kept in the cache file: models served in turn are asked once each.
CACHE_ENTRIES = 32
#: More of a file that is no weights is not looked at.
SMALL_FILE_BYTES = 1 << 26
MODEL_MOUNT = "/kvpersist/model"


class CheckerError(RuntimeError):
    """The image could not be asked. The message says what failed."""


def differences(fields: Mapping[str, object], resolved: Mapping[str, object]) -> List[Dict[str, object]]:
    """Pins that are not what was resolved: ``{"field", "pinned", "found"}`` each, in the order of ``resolved``.

    Only fields that are pins are compared; both sides are normalised first, so that equal
    spellings are equal. A resolved value that no identity can carry is a difference too.
    """
    found = []
    for name, value in resolved.items():
        if name not in fields:
            continue
        actual, pinned = _normalised(name, value), _normalised(name, fields[name])
        if pinned != actual:
            found.append({"field": name, "pinned": pinned, "found": actual})
    return found


def _normalised(name: str, value: object) -> object:
    try:
        return check_field(name, value)
    except IdentityError:
        return value


class Checker:
    """Asks one image about one model. ``model_dir`` is on this host, ``mounted_dir`` holds it whole.

    A snapshot of a Hub cache links out of itself, so that its parent has to be mounted.
    """

    def __init__(
        self,
        image: str,
        model_dir: str,
        mounted_dir: str,
        arguments: Sequence[str],
        docker_args: Sequence[str],
        python: str,
        timeout_seconds: int,
    ) -> None:
        self.image = image
        self.model_dir = model_dir.rstrip("/")
        inside = MODEL_MOUNT + self.model_dir[len(mounted_dir.rstrip("/")) :]
        self.command = [
            *(
                "docker",
                "run",
                "--rm",
                "--name",
                CONTAINER,
                "--network",
                "none",
                "--read-only",
                "--tmpfs",
                "/tmp:exec,mode=1777",
            ),
            *("--env", "HOME=/tmp", "--env", "TMPDIR=/tmp", "--cap-drop", "ALL", "--entrypoint", ""),
            *("--volume", f"{mounted_dir}:{MODEL_MOUNT}:ro", "--volume", f"{RESOLVER}:{RESOLVER}:ro"),
            *docker_args,
            *(image, python, RESOLVER),
        ]
        self.arguments = [inside, *arguments]
        self.timeout_seconds = timeout_seconds

    def _named_by_its_path(self) -> Dict[str, str]:
        """Model and revision, where the directory is a snapshot of a Hub cache."""
        match = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})$", self.model_dir)
        return {"model_id": f"{match[1]}/{match[2]}", "model_revision": match[3]} if match else {}

    def image_id(self) -> str:
        """Id of the image: its content. Raises :class:`CheckerError` where docker does not have it."""
        run = _run(["docker", "image", "inspect", "--format", "{{.Id}}", self.image], 60)
        if run.returncode:
            raise CheckerError(f"docker does not have the image {self.image}: {run.stderr.strip()}")
        return run.stdout.strip()

    def resolve(self, connector: Sequence[str], with_content: bool) -> Dict[str, Any]:
        """The resolver's answer, with the weights' fingerprint, from the cache file where it is there.

        ``failed`` in it is the error of an image that could not make sense of the model.
        Raises :class:`CheckerError`, :class:`weights.WeightsError`.
        """
        fingerprint = weights.fingerprint(self.model_dir)
        with open(RESOLVER, "rb") as file:
            resolver = hashlib.sha256(file.read()).hexdigest()
        asked = [
            self.image_id(),
            fingerprint,
            self._small_files(),
            resolver,
            self.command,
            self.arguments,
            list(connector),
        ]
        answers = _read_cache()
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        answer: Dict[str, Any] = answers.pop(key, None) or {}
        known = bool(answer)
        if not known:
            answer = self._ask(connector)
            answer["weights_fingerprint"] = fingerprint
            answer.update(self._named_by_its_path())
        if with_content and answer.get("content_of") != self._files():
            answer["weights_sha256"] = weights.content_sha256(self.model_dir)
            answer["content_of"] = self._files()
        if "failed" not in answer:
            answers[key] = answer
            _write_cache(answers)
        if not with_content:
            answer.pop("weights_sha256", None)  # kept from a time when it was asked for
        return {**answer, "known": known}

    def _small_files(self) -> List[List[str]]:
        """Digests of the files that are no weights: tokenizer, chat template and the like."""
        found = []
        for name in sorted(os.listdir(self.model_dir)):
            path = os.path.join(self.model_dir, name)
            if os.path.isfile(path) and not name.endswith(weights.WEIGHT_SUFFIXES):
                with open(path, "rb") as file:
                    found.append([name, hashlib.sha256(file.read(SMALL_FILE_BYTES)).hexdigest()])
        return found

    def _files(self) -> List[List[object]]:
        """Identity of the files on disk: reading all of them again is only needed when it changes."""
        files = []
        for name in sum(weights.model_files(self.model_dir), []):
            seen = os.stat(os.path.join(self.model_dir, name))
            files.append([name, seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns])
        return files

    def _ask(self, connector: Sequence[str]) -> Dict[str, Any]:
        words = ["--connector", *connector] if connector else []
        try:
            run = _run([*self.command, *words, *self.arguments], self.timeout_seconds)
        except CheckerError:
            _run(["docker", "rm", "--force", CONTAINER], 60)  # the client is gone, the container is not
            raise
        if run.returncode:
            raise CheckerError(f"the check could not run in {self.image}: {run.stderr.strip()[-1000:]}")
        try:
            answer = json.loads(run.stdout)
        except ValueError:
            raise CheckerError(f"the check in {self.image} printed no JSON: {run.stdout[:200]!r}") from None
        return dict(answer)


def _run(command: Sequence[str], timeout_seconds: int) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except OSError as error:
        raise CheckerError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CheckerError(f"{' '.join(command[:3])} took longer than {timeout_seconds} s") from None


def _read_cache() -> Dict[str, Any]:
    try:
        with open(CACHE_FILE, encoding="utf-8") as file:
            answers = json.load(file)
    except (OSError, ValueError):
        return {}
    return answers if isinstance(answers, dict) else {}


def _write_cache(answers: Dict[str, Any]) -> None:
    newest = dict(list(answers.items())[-CACHE_ENTRIES:])
    os.makedirs(os.path.dirname(CACHE_FILE), mode=0o700, exist_ok=True)
    part = f"{CACHE_FILE}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(newest, file)
    os.replace(part, CACHE_FILE)
