"""What each variable of the roles may hold.

The pins (``kvp_identity_*`` with a field of the same name) are not among them: they have rules of
their own (:mod:`.identity`), as a doubtful pin may be served uncached. What needs a look at the host,
or at two variables at once, is left to the roles.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import Any, Callable, Dict, List, Mapping, NamedTuple

from . import identity, render
from .arguments import docker_variables
from .objects import CODECS

#: Characters of a message that quote a value.
SHOWN = 120


class Rule(NamedTuple):
    """Whether a value is allowed, and what is, in words. A secret's value is never quoted."""

    holds: Callable[[Any], bool]
    allowed: str
    secret: bool = False


def problems(variables: Mapping[str, Any]) -> List[str]:
    """A line for each variable whose value is not allowed: name, value and what is; and for each that nobody reads."""
    found = []
    for name in variables:
        if name.startswith(_PREFIXES) and name not in _OTHERS and name not in RULES:
            (near,) = difflib.get_close_matches(name, [*RULES, *_OTHERS], 1, cutoff=0)
            found.append(f"{name} is no variable of this collection; did you mean {near}?")
    for name, rule in RULES.items():
        if name in variables and not rule.holds(variables[name]):
            found.append(f"{name} is {_shown(variables[name], rule.secret)}; allowed: {rule.allowed}")
    return found


def _shown(value: Any, secret: bool) -> str:
    if secret:
        return "not shown"
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _number(value: Any) -> float:
    """NaN, which no comparison holds for, unless it is a number or its plain digits."""
    if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]+([.][0-9]+)?(e[+-]?[0-9]+)?", str(value), re.ASCII):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def whole(least: int, most: int, unit: str = "") -> Rule:
    """A whole number, as such or in digits."""

    def holds(value: Any) -> bool:
        plain = not isinstance(value, (bool, float)) and re.fullmatch(r"(0|[1-9][0-9]{0,18})", str(value), re.ASCII)
        return bool(plain) and least <= int(value) <= most

    return Rule(holds, f"a whole number{unit and ' of ' + unit}, {least} to {most}")


def number(holds: Callable[[float], bool], allowed: str) -> Rule:
    """A finite number, as such or in digits, for which ``holds``."""
    return Rule(lambda value: math.isfinite(_number(value)) and holds(_number(value)), allowed)


def text(pattern: str, allowed: str, but: str = "") -> Rule:
    """A string or whole number that matches the pattern from end to end, and in which ``but`` is not found."""

    def holds(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            return False
        return bool(re.fullmatch(pattern, str(value))) and not (but and re.search(but, str(value)))

    return Rule(holds, allowed)


def one_of(*choices: str) -> Rule:
    return Rule(lambda value: isinstance(value, str) and value in choices, ", ".join(choices))


def _word(value: Any) -> bool:
    """What one argument of a process can be: a string of UTF-8 without NUL, a number or a boolean."""
    if isinstance(value, (bool, int)):
        return True
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        return isinstance(value, str) and "\0" not in value.encode().decode()
    except UnicodeError:
        return False


def words(allowed: str, holds: Callable[[Any], bool] = _word, least: int = 0, secret: bool = False) -> Rule:
    """A list of arguments, in which no word is empty."""

    def each(value: Any) -> bool:
        return isinstance(value, list) and len(value) >= least and all(holds(word) and word != "" for word in value)

    return Rule(each, allowed, secret)


#: Names that say that their value is a secret, which `docker inspect` would show.
_SECRET = re.compile(r"(token|secret|password|passwd|pass|pat|key|credential)s?(_?[0-9]+)?$", re.I)


def _environment(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str)
        and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        and not _SECRET.search(name)
        and _word(word)
        for name, word in value.items()
    )


def _docker_words(value: Any) -> bool:
    words_only = isinstance(value, list) and all(_word(word) and word != "" for word in value)
    return words_only and not any(_SECRET.search(name) for name in docker_variables(value))


def _quotas(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._/:@+-]+", name) and _number(size) > 0
        for name, size in value.items()
    )


#: What Ansible's filter ``bool`` understands.
_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})


def _boolean(value: Any) -> bool:
    return isinstance(value, (bool, int, str)) and str(value).lower() in _BOOLEANS


#: A path that units, mount tables and docker take as it is.
_PATH = r"(/[A-Za-z0-9._@+-]+)+"
_UP = r"(^|/)[.]{1,2}(/|$)"
_PATH_WORDS = "an absolute path of letters, digits and ._@+- between single slashes, without one at its end"
#: Not seen by a server with ProtectHome= and PrivateTmp=, or not a place for files.
_HIDDEN = r"^/(home|root|run|tmp|var/tmp|dev|proc|sys)(/|$)"
#: The system's own, and what uninstall.yml removes.
_SYSTEM = (
    r"^/(etc|usr|boot|bin|sbin|lib[0-9]*)(/|$)|^/var/cache/kvpersist|^/(var(/cache|/lib)?|opt(/kvpersist)?|srv|mnt)$"
)

PATH = text(_PATH + "/?", "an absolute path of letters, digits and ._@+- between single slashes", but=_UP)
DEVICE = text(r"/dev/[!-~]+", "a path below /dev, such as /dev/disk/by-id/nvme-...", but=_UP)
PORT = whole(1, 65535)
PAGE_GIB = 4096 / render.GIB
WEEK = 7 * 86400
SECONDS = whole(1, WEEK, "seconds")
FRACTION = number(lambda value: 0 < value <= 1, "a number above 0, at most 1")
ACCOUNT = text(
    r"[a-z_][a-z0-9_-]{0,30}", "a name of small letters, digits and _-, up to 31, and not root", but=r"^root$"
)
PROGRAM = text(r"[A-Za-z0-9._/][A-Za-z0-9._/+-]*", "a program: letters, digits and ._/+-")
#: Index or UUID of a GPU or of a part of one.
_GPU = r"[A-Za-z0-9:/._-]+"


def or_empty(rule: Rule) -> Rule:
    return Rule(lambda value: value == "" or rule.holds(value), f'{rule.allowed}, or ""')


#: Of root; a slip could be the secret itself.
SECRET_FILE = or_empty(PATH)._replace(secret=True)


_NO_SECRETS = (
    "no variable whose name ends in TOKEN, SECRET, PASSWORD, PASS, PAT, KEY or CREDENTIALS, which docker inspect would"
    " show: kvp_vllm_api_key_file and kvp_vllm_hf_token_file name files of root instead"
)

RULES: Dict[str, Rule] = {
    "kvp_cache_root": text(
        _PATH,
        f"{_PATH_WORDS}, and not below /home, /root, /run, /tmp or /var/tmp, which the sandboxed server does not see,"
        " nor a directory of the system's or the product's own",
        but=f"{_UP}|{_HIDDEN}|{_SYSTEM}",
    ),
    "kvp_l1_size_gb": number(
        lambda value: value > 0 and value / PAGE_GIB % 1 == 0,
        "a number of GiB above 0 that is a whole number of 4096-byte pages, such as 64 or 0.5",
    ),
    "kvp_l2_size_gb": number(lambda value: value >= 0.01, "a number of GB (10^9 bytes), at least 0.01"),
    "kvp_l2_serde": one_of(*CODECS),
    "kvp_user": ACCOUNT,
    "kvp_group": ACCOUNT,
    "kvp_uid": whole(1, 2**32 - 3),
    "kvp_lmcache_host": text(
        r"127[.]0[.]0[.]1|localhost",
        "127.0.0.1 or localhost (neither port has a password, so they stay on loopback; LMCache knows no IPv6)",
    ),
    "kvp_lmcache_port": PORT,
    "kvp_lmcache_http_port": PORT,
    "kvp_storage_device": or_empty(DEVICE),
    "kvp_storage_filesystem": one_of("xfs", "ext4"),
    # Only compared; the role says what is there and what to write.
    "kvp_storage_format_consent": text(r"[ -~]{0,255}", "kvp_storage_device to the letter"),
    "kvp_storage_mount": text(_PATH, _PATH_WORDS, but=_UP),
    "kvp_storage_mount_options": text(
        r'[A-Za-z0-9._/:=,@+%"-]+', 'options separated by commas, without blanks or #; "defaults" for none'
    ),
    "kvp_lmcache_variant": one_of("cuda", "cpu"),
    "kvp_lmcache_venv": text(
        _PATH,
        f"{_PATH_WORDS}, and not a directory of the system's own: uninstall.yml removes it",
        but=rf"{_UP}|^/(etc|boot|bin|sbin|lib[0-9]*|dev|proc|sys)(/|$)|^/(usr(/local|/lib)?|var(/lib|/cache)?|opt|srv|home|root|mnt)$",
    ),
    "kvp_lmcache_python": PROGRAM,
    "kvp_lmcache_wheel_dir": or_empty(PATH),
    "kvp_lmcache_index_args": words("a list of arguments of pip, none of them empty", secret=True),
    "kvp_lmcache_l2_adapter": one_of(*render.L2_ADAPTERS),
    "kvp_lmcache_trigger_watermark": FRACTION,
    "kvp_lmcache_eviction_ratio": FRACTION,
    "kvp_lmcache_fsync": one_of(*render.FSYNC),
    "kvp_lmcache_reserve_gb": number(lambda value: value >= 0, "a number of GB (10^9 bytes), at least 0"),
    "kvp_lmcache_quotas_gb": Rule(_quotas, "numbers of GB (10^9 bytes) above 0 by model name"),
    "kvp_lmcache_direct_io": Rule(_boolean, "true or false"),
    "kvp_lmcache_start_timeout": SECONDS,
    "kvp_lmcache_stop_timeout": SECONDS,
    "kvp_lmcache_extra_args": words(
        "a list of arguments, each of letters, digits and _./:=,@+- (a unit file would change others)",
        lambda word: isinstance(word, (str, int)) and bool(re.fullmatch(r"[A-Za-z0-9_./:=,@+-]+", str(word))),
    ),
    "kvp_vllm_image": text(
        r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "an image as docker names it, such as lmcache/vllm-openai@sha256:..."
    ),
    "kvp_vllm_image_unpinned": Rule(_boolean, "true or false"),
    "kvp_vllm_image_pull": one_of("missing", "never"),
    "kvp_vllm_model_dir": PATH,
    "kvp_vllm_container_name": text(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", "letters, digits and _.- , two or more"),
    "kvp_vllm_served_model_name": Rule(
        lambda value: isinstance(value, str) and _word(value) and value.isprintable() and value[:1] not in ("", "-"),
        "one line of text that does not begin with -",
    ),
    "kvp_vllm_host": text(r"[0-9A-Za-z:][0-9A-Za-z.:-]*", "an IP address or a host name"),
    "kvp_vllm_port": PORT,
    "kvp_vllm_api_key_file": SECRET_FILE,
    "kvp_vllm_hf_token_file": SECRET_FILE,
    "kvp_vllm_gpus": or_empty(
        text(
            rf'(all|[1-9][0-9]*|device={_GPU}|"device={_GPU}(,{_GPU})*")',
            "all, a number above 0, device=0 or '\"device=0,1\"'",
        )
    ),
    "kvp_vllm_memory": or_empty(
        text(r"[1-9][0-9]*([.][0-9]+)?[kmgtKMGT]([iI]?[bB])?", "a size with its unit as docker takes it, such as 200g")
    ),
    "kvp_vllm_command": words("a list of at least one word", least=1),
    "kvp_vllm_extra_args": words("a list of words, none of them empty"),
    "kvp_vllm_docker_args": Rule(
        _docker_words, f"a list of words, none of them empty, that set {_NO_SECRETS}", secret=True
    ),
    "kvp_vllm_env": Rule(
        _environment,
        f"values without NUL by name, of letters, digits and _, and {_NO_SECRETS}",
        secret=True,
    ),
    "kvp_vllm_start_timeout": SECONDS,
    "kvp_vllm_drain_timeout": whole(0, WEEK, "seconds"),
    "kvp_vllm_stop_timeout": SECONDS,
    "kvp_vllm_lmcache_wait": whole(0, WEEK, "seconds"),
    "kvp_vllm_lmcache_timeout": SECONDS,
    "kvp_identity_uncertain": one_of("fail", "serve-uncached"),
    "kvp_identity_python": PROGRAM,
    "kvp_verify_deadline": SECONDS,
    "kvp_verify_recovery_scenarios": words("a list of A, A' and B", ("A", "A'", "B").__contains__, least=1),
    "kvp_verify_recovery_signals": words("a list of SIGTERM and SIGKILL", ("SIGTERM", "SIGKILL").__contains__, least=1),
    "kvp_verify_recovery_tokens": whole(1, 10**7, "tokens"),
    "kvp_verify_recovery_hit": FRACTION,
}

#: Names that begin like this belong to the roles: one that none of them reads is a slip, or of another release.
_PREFIXES = ("kvp_storage_", "kvp_identity_", "kvp_lmcache_", "kvp_vllm_", "kvp_verify_")
#: The pins, which have rules of their own; paths on the controller; what kvp_identity found.
_OTHERS = {
    *(f"kvp_identity_{field}" for field in identity.FIELDS),
    *("kvp_identity_file", "kvp_verify_report_dir"),
    *("kvp_identity_namespace", "kvp_identity_model_name", "kvp_identity_doubts"),
}
