#!/usr/bin/python
"""Send one long chat to a deployed vLLM and say where its KV came from."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: chat_probe
short_description: Send one long chat to a deployed vLLM and say where its KV came from
version_added: 0.1.0
description:
  - Sends a generated conversation through the OpenAI API of the vLLM that C(kvp_vllm) deployed, at temperature 0.
  - Compares LMCache's counters before and after, which tell tokens found in memory from tokens found on disk.
  - Meant for a quiet server, since the counters belong to the server and not to the request.
options:
  config:
    description: What C(kvp_vllm) wrote; names the endpoints.
    type: path
    default: /etc/kvpersist/vllm.json
  conversation:
    description: Seed of the conversation; another number is another text from its first words on.
    type: int
    default: 1
  prompt_tokens:
    description: Rough length of the conversation in tokens.
    type: int
    default: 3600
  max_tokens:
    description: Length of the answer in tokens.
    type: int
    default: 24
  cache_salt:
    description: Text that separates this request from every cached one; with a new one the prompt is recomputed.
    type: str
    default: ""
  timeout:
    description: Seconds that the answer may take.
    type: int
    default: 600
author:
  - sikkatu (@sikkatu)
attributes:
  check_mode:
    support: full
    description: Sends the chat in check mode too; nothing on the host is changed.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Ask, and see where the prompt came from
  sikkatu.kvpersist.chat_probe:
    conversation: 7
  register: answer
"""

RETURN = r"""
text:
  description: The answer.
  returned: success
  type: str
token_ids:
  description: The answer's tokens.
  returned: success
  type: list
  elements: int
prompt_tokens:
  description: Tokens of the prompt.
  returned: success
  type: int
cached_tokens:
  description: Tokens of the prompt that were not computed, from vLLM's memory, L1 or disk.
  returned: success
  type: int
l1_tokens:
  description: Tokens that LMCache found in memory; null when the lmcache server did not answer.
  returned: success
  type: int
l2_tokens:
  description: Tokens that LMCache found on disk; null when the lmcache server did not answer.
  returned: success
  type: int
stored_chunks:
  description: Chunks that LMCache wrote to disk meanwhile; null when the lmcache server did not answer.
  returned: success
  type: int
settled:
  description: Whether everything that this chat added was on disk before the module returned.
  returned: success
  type: bool
ttft_seconds:
  description: Seconds to the first token.
  returned: success
  type: float
total_seconds:
  description: Seconds to the last token.
  returned: success
  type: float
"""

import json
import pathlib

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.kvpersist.probe import ProbeError, conversation, probe


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "config": {"type": "path", "default": "/etc/kvpersist/vllm.json"},
            "conversation": {"type": "int", "default": 1},
            "prompt_tokens": {"type": "int", "default": 3600},
            "max_tokens": {"type": "int", "default": 24},
            "cache_salt": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        config = json.loads(pathlib.Path(given["config"]).read_text(encoding="utf-8"))
        endpoint, lmcache_url = config["endpoint"], config["lmcache"]["url"]
        key_file = endpoint["api_key_file"]
        api_key = pathlib.Path(key_file).read_text(encoding="utf-8").split("\n")[0].strip() if key_file else ""
    except (OSError, ValueError, KeyError) as error:
        module.fail_json(msg=f"config is {given['config']!r}: {error!r}; run site.yml on this host first")
    try:
        result = probe(
            lmcache_url,
            url=endpoint["url"],
            model=endpoint["model"],
            api_key=api_key,
            messages=conversation(given["conversation"], given["prompt_tokens"]),
            max_tokens=given["max_tokens"],
            cache_salt=given["cache_salt"],
            timeout=given["timeout"],
        )
    except ProbeError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
