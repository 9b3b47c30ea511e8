#!/usr/bin/python
"""Compare the pins of a model with what the serving image makes of it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: identity_check
short_description: Compare the pins of a model with what the serving image makes of it
version_added: 0.2.0
description:
  - Runs C(/usr/lib/kvpersist/resolve-identity), which the C(kvp) role installs, in the serving image. It asks the
    image's own vLLM, transformers and LMCache; no weights are read into memory.
  - The answer is kept in C(/var/cache/kvpersist-identity/resolved.json) and asked again only when the image, the model
    or the arguments change.
  - The fingerprint of the weights is taken on the host, each time.
options:
  fields:
    description: The pins. Without them nothing is compared, and RV(resolved) says what could be pinned.
    type: dict
    default: {}
  image:
    description: The serving image.
    type: str
    required: true
  model_dir:
    description: Directory on the host with C(config.json) and the weights.
    type: path
    required: true
  mounted_dir:
    description: Directory that the container gets, O(model_dir) or a parent of it that its links point into.
    type: path
  arguments:
    description: Arguments of C(vllm serve) that the model is served with.
    type: list
    elements: str
    default: []
  docker_args:
    description: Further arguments of C(docker run).
    type: list
    elements: str
    default: []
  python:
    description: Python inside the image that has vLLM.
    type: str
    default: python3
  connector:
    description: Name of the connector and the module that has it; nothing to leave it unchecked.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that the image may take.
    type: int
    default: 900
author:
  - sikkatu (@sikkatu)
attributes:
  check_mode:
    support: full
    description: Asks in check mode too; apart from the kept answer nothing on the host is changed.
  diff_mode:
    support: none
    description: RV(differences) is what differs.
"""

EXAMPLES = r"""
- name: See what a model could be pinned to
  sikkatu.kvpersist.identity_check:
    image: lmcache/vllm-openai@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
    model_dir: /srv/models/Qwen3-32B
    arguments: [--tensor-parallel-size, "4"]
    docker_args: [--gpus, all]
  register: found
"""

RETURN = r"""
namespace:
  description: Namespace of the pins, whether they are true or not; empty when they are no identity.
  returned: success
  type: str
model_name:
  description: Name that vLLM would serve under, ending in the namespace; empty when the pins are no identity.
  returned: success
  type: str
canonical:
  description: The bytes that are hashed; empty when the pins are no identity.
  returned: success
  type: str
resolved:
  description: What the image says, by field of the identity.
  returned: success
  type: dict
differences:
  description: Pins that are something else, each with C(field), C(pinned) and C(found).
  returned: success
  type: list
  elements: dict
doubts:
  description: The differences and everything else that speaks against caching, as text. Empty when all agree.
  returned: success
  type: list
  elements: str
chat_template_dated:
  description: Whether the chat template prints the date, so that prompts change at midnight.
  returned: success
  type: bool
known:
  description: Whether the answer was kept from an earlier run.
  returned: success
  type: bool
"""

import json

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kvpersist.checker import Checker, CheckerError, differences
from ..module_utils.kvpersist.identity import FIELDS, CacheIdentity
from ..module_utils.kvpersist.identity import doubts as doubts_of
from ..module_utils.kvpersist.weights import WeightsError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "fields": {"type": "dict", "default": {}},
            "image": {"type": "str", "required": True},
            "model_dir": {"type": "path", "required": True},
            "mounted_dir": {"type": "path"},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "docker_args": {"type": "list", "elements": "str", "default": []},
            "python": {"type": "str", "default": "python3"},
            "connector": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 900},
        },
        supports_check_mode=True,
    )
    given = module.params
    if len(given["connector"]) not in (0, 2):
        module.fail_json(msg=f"connector is {given['connector']!r}; allowed: its name and its module, or nothing")
    mounted = given["mounted_dir"] or given["model_dir"]
    if not (given["model_dir"] + "/").startswith(mounted.rstrip("/") + "/"):
        module.fail_json(msg=f"mounted_dir is {mounted}; allowed: a directory that holds {given['model_dir']}")
    fields = given["fields"]
    try:
        checker = Checker(
            image=given["image"],
            model_dir=given["model_dir"],
            mounted_dir=mounted,
            arguments=given["arguments"],
            docker_args=given["docker_args"],
            python=given["python"],
            timeout_seconds=given["timeout"],
        )
        answer = checker.resolve(given["connector"], with_content=bool(fields.get("weights_sha256")))
    except (CheckerError, WeightsError, OSError) as error:
        answer = {"doubts": [str(error)], "known": False}
    resolved = {name: answer[name] for name in FIELDS if name in answer}
    different = differences(fields, resolved)
    doubts = doubts_of(fields) if fields else []
    identity = CacheIdentity.from_fields(fields) if fields and not doubts else None
    for each in different:
        pinned, found = json.dumps(each["pinned"]), json.dumps(each["found"])
        doubts.append(f"{each['field']} is pinned as {pinned}, but the serving image says {found}")
    doubts += answer.get("doubts", [])
    if "failed" in answer:
        doubts.append(f"the serving image could not make sense of the model: {answer['failed']}")
    module.exit_json(
        changed=False,
        namespace=identity.namespace() if identity else "",
        model_name=identity.lmcache_model_name() if identity else "",
        canonical=identity.canonical_json().decode("ascii") if identity else "",
        resolved=resolved,
        differences=different,
        doubts=doubts,
        chat_template_dated=answer.get("chat_template_dated", False),
        known=answer["known"],
    )


if __name__ == "__main__":
    main()
