#!/usr/bin/python
"""Remove chunks from the cache of a VM."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cache_cleanup
short_description: Remove chunks from the cache of a VM
version_added: 0.2.0
description:
  - Runs C(kvp-admin cleanup) on the VM. What is removed is the union of the selections; without one nothing is.
  - Only chunks, unfinished writes and damaged files that were moved aside are removed, never a link or another file.
options:
  dead:
    description: Chunks of namespaces that the VM does not serve.
    type: bool
    default: false
  namespace:
    description: Chunks of this namespace, by C(kvp-...) or by its whole name.
    type: str
    default: ""
  older_than:
    description: Only what was not used for a time such as C(30d) or C(12h).
    type: str
    default: ""
  temp:
    description: Unfinished writes that nothing touched for an hour.
    type: bool
    default: false
  corrupt:
    description: Damaged files that were moved aside.
    type: bool
    default: false
  to_budget_gb:
    description: Least recently used chunks until the cache takes so many GB of 10^9 bytes, dead ones first; 0 for not.
    type: float
    default: 0
  executable:
    description: The command.
    type: path
    default: /usr/local/bin/kvp-admin
author:
  - sikkatu (@sikkatu)
attributes:
  check_mode:
    support: full
    description: Lists what would be removed.
  diff_mode:
    support: full
    description: Shows the names that go.
"""

EXAMPLES = r"""
- name: Forget the models that this VM does not serve any more
  sikkatu.kvpersist.cache_cleanup:
    dead: true
    older_than: 30d
"""

RETURN = r"""
files:
  description: What was, or in check mode would be, removed, each with C(name) and C(bytes) on the disk.
  returned: success
  type: list
  elements: dict
bytes:
  description: Their disk bytes.
  returned: success
  type: int
"""

import json

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "dead": {"type": "bool", "default": False},
            "namespace": {"type": "str", "default": ""},
            "older_than": {"type": "str", "default": ""},
            "temp": {"type": "bool", "default": False},
            "corrupt": {"type": "bool", "default": False},
            "to_budget_gb": {"type": "float", "default": 0},
            "executable": {"type": "path", "default": "/usr/local/bin/kvp-admin"},
        },
        supports_check_mode=True,
    )
    given = module.params
    words = [f"--{name}" for name in ("dead", "temp", "corrupt") if given[name]]
    words += ["--namespace", given["namespace"]] if given["namespace"] else []
    words += ["--older-than", given["older_than"]] if given["older_than"] else []
    words += ["--to-budget", str(given["to_budget_gb"])] if given["to_budget_gb"] else []
    words += [] if module.check_mode else ["--apply"]
    try:
        command = [given["executable"], "cleanup", "--json", *words]
        code, out, error = module.run_command(command, handle_exceptions=False)
    except OSError as missing:
        module.fail_json(msg=f"{given['executable']}: {missing.strerror}. The kvp role installs it: run site.yml first")
    if code not in (0, 1) or not out.strip():
        module.fail_json(msg=f"kvp-admin cleanup: {error.strip()}", rc=code)
    result = json.loads(out)
    if result["kept"]:
        module.fail_json(msg=f"Not everything could be removed: {json.dumps(result['kept'])}", **result)
    names = "".join(f"{file['name']}\n" for file in result["files"])
    module.exit_json(
        changed=bool(result["files"]), diff={"before": names, "after": ""}, files=result["files"], bytes=result["bytes"]
    )


if __name__ == "__main__":
    main()
