#!/usr/bin/python
"""Say what the cache of a VM holds and whether it is used."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cache_info
short_description: Say what the cache of a VM holds and whether it is used
version_added: 0.2.0
description:
  - Runs C(kvp-admin report) and C(kvp-admin status) on the VM, which the C(kvp) role installed.
options:
  executable:
    description: The command.
    type: path
    default: /usr/local/bin/kvp-admin
author:
  - sikkatu (@sikkatu)
attributes:
  check_mode:
    support: full
    description: It only reads.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Look at the cache
  sikkatu.kvpersist.cache_info:
  register: cache
"""

RETURN = r"""
report:
  description: Output of C(kvp-admin report --json), by namespace and by class of bytes, with the warnings.
  returned: success
  type: dict
status:
  description: Output of C(kvp-admin status --json), with the problems.
  returned: success
  type: dict
"""

import json

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={"executable": {"type": "path", "default": "/usr/local/bin/kvp-admin"}},
        supports_check_mode=True,
    )
    found, executable = {}, module.params["executable"]
    for command in ("report", "status"):
        try:
            code, out, error = module.run_command([executable, command, "--json"], handle_exceptions=False)
        except OSError as missing:
            module.fail_json(msg=f"{executable}: {missing.strerror}. The kvp role installs it: run site.yml first")
        # status ends with 1 when it has problems to tell.
        if code not in ((0, 1) if command == "status" else (0,)):
            module.fail_json(msg=f"kvp-admin {command}: {error.strip() or out.strip()}", rc=code)
        found[command] = json.loads(out)
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
