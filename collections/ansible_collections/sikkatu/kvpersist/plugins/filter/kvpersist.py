"""Filters of the collection: thin wrappers around the core, which holds the rules."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping

from ansible.errors import AnsibleFilterError

from ..module_utils.kvpersist import arguments, identity, render, variables
from ..module_utils.kvpersist.identity import CacheIdentity


def _filter(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise AnsibleFilterError(str(error)) from error

    return wrapped


def _identity(fields: Mapping[str, object]) -> CacheIdentity:
    if not isinstance(fields, Mapping):
        raise ValueError(f"the identity is {fields!r}; allowed: a dictionary of its fields")
    return CacheIdentity.from_fields(fields)


def _pins(fields: Mapping[str, object], partial: bool = False) -> Dict[str, Any]:
    if not partial:
        return dict(_identity(fields).items)
    pins = {}
    for name in identity.FIELDS:
        try:
            pins[name] = identity.check_field(name, fields.get(name))
        except identity.IdentityError:
            continue
    return pins


def _doubts(
    fields: Mapping[str, object],
    extra_args: Iterable[object] = (),
    names: Iterable[object] = (),
    docker_args: Iterable[object] = (),
) -> List[str]:
    return [
        *identity.doubts(fields),
        *arguments.doubtful_arguments(extra_args),
        *arguments.doubtful_variables([*names, *arguments.docker_variables(docker_args)]),
    ]


class FilterModule:
    """Short names for playbooks; documented one by one in the files beside this one."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        return {
            "kvp_namespace": _filter(lambda fields: _identity(fields).namespace()),
            "kvp_model_name": _filter(lambda fields: _identity(fields).lmcache_model_name()),
            "kvp_identity": _filter(_pins),
            "kvp_doubts": _filter(_doubts),
            "kvp_serve_args": _filter(render.serve_args),
            "kvp_doubtful_server_args": _filter(arguments.doubtful_server_arguments),
            "kvp_problems": _filter(variables.problems),
            "kvp_env_file": _filter(render.env_file),
            "kvp_l2_adapter": _filter(render.l2_adapter),
            "kvp_kv_transfer": _filter(render.kv_transfer),
        }
