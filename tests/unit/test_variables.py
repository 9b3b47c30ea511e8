"""Every variable of the roles against nasty values: refused by name, or safe where it ends up."""

import re

import pytest
import yaml
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import identity, variables
from conftest import COLLECTION

SPECS = {
    name: option
    for path in sorted(COLLECTION.glob("roles/*/meta/argument_specs.yml"))
    for name, option in yaml.safe_load(path.read_text())["argument_specs"]["main"]["options"].items()
}
PINS = {f"kvp_identity_{field}" for field in identity.FIELDS if field != "store_format"}
#: Paths on the controller, which any text can be.
CONTROLLER = {"kvp_identity_file", "kvp_verify_report_dir"}

NASTY = {
    "quotes": "a'b\"c`d",
    "newline": "a\nb",
    "return": "a\rb",
    "percent": "%i %n",
    "dollar": "$HOME ${PATH} $(id)",
    "backslash": "a\\nb\\",
    "semicolon": "a; id",
    "blank": " ",
    "around": " 1 ",
    "long": "x" * 10240,
    "unicode": "ключ-键-\u2028",
    "digits of another script": "١٢٣",
    "nul": "a\0b",
    "surrogate": "a\udc80",
    "template": "{{ 1 + 1 }}",
    "option": "--privileged",
    "null": None,
    "true": True,
    "negative": -1,
    "infinite": "inf",
    "not a number": "nan",
    "fraction": 1.5,
    "huge": 10**30,
    "list": [["a"]],
    "list of null": [None],
    "list of nothing": [""],
    "dictionary": {"a b": {"c": 1}},
    "dictionary with NUL": {"A": "\0"},
}

#: What reaches docker or pip word by word, as arguments or environment (test_launcher.py and molecule/default compare),
#: and what is only compared.
WORD_BY_WORD = {
    "kvp_vllm_served_model_name",
    "kvp_vllm_command",
    "kvp_vllm_extra_args",
    "kvp_vllm_docker_args",
    "kvp_vllm_env",
    "kvp_vllm_gpus",
    "kvp_lmcache_index_args",
    "kvp_storage_format_consent",
}


def test_each_variable_has_its_rule():
    assert set(variables.RULES) | PINS | CONTROLLER == set(SPECS)


def test_defaults_and_choices_are_allowed():
    values = {name: option["default"] for name, option in SPECS.items() if "{{" not in str(option.get("default", "{{"))}
    assert variables.problems(values) == []
    for name, option in SPECS.items():
        for choice in option.get("choices", []):
            assert variables.problems({name: [choice] if option["type"] == "list" else choice}) == []


def accepted(name):
    """The nasty values that a variable takes; those that it does not are refused in one line that says all."""
    for kind, value in NASTY.items():
        found = variables.problems({name: value})
        if found:
            assert len(found) == 1
            assert found[0].startswith(f"{name} is ")
            assert "; allowed: " in found[0]
            assert found[0].isprintable()
            assert len(found[0]) < 500
        else:
            yield kind, value


@pytest.mark.parametrize("name", sorted(variables.RULES))
def test_a_nasty_value_is_refused_by_name_unless_nothing_can_change_it(name):
    for kind, value in accepted(name):
        assert not isinstance(value, dict) or name == "kvp_vllm_env", kind
        if name not in WORD_BY_WORD:  # units, env files, fstab and docker's volumes take these characters as they are
            for word in value if isinstance(value, list) else [value]:
                assert re.fullmatch(r"[A-Za-z0-9._/:=,@+-]+", str(word), re.ASCII), kind


@pytest.mark.parametrize("name", sorted(WORD_BY_WORD))
@pytest.mark.parametrize("kind", ["nul", "surrogate", "null", "list", "list of null", "list of nothing", "dictionary"])
def test_no_process_is_given_what_it_cannot_be_given(name, kind):
    assert variables.problems({name: NASTY[kind]})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kvp_vllm_port", [0, 65536, "8000 ", "08000", 8000.0, True]),
        ("kvp_l1_size_gb", [0, 0.3, "64GiB", False]),
        ("kvp_lmcache_quotas_gb", [{"a": 0}, {"a": "x"}, {1: 1}, {"a b": 1}]),
        ("kvp_vllm_env", [{"1A": "x"}, {"A B": "x"}, {"A": None}, {"A": ["x"]}]),
        ("kvp_cache_root", ["/", "/var/lib/../x", "/tmp/x", "/root", "/var//lib", "/var/lib/", "var/lib"]),
        (
            "kvp_cache_root",
            ["/var/cache/kvpersist/chunks", "/etc/kvpersist/x", "/usr/lib/x", "/var/lib", "/opt", "/mnt"],
        ),
        ("kvp_lmcache_venv", ["/usr", "/usr/local", "/opt", "/etc/x", "/root"]),
        ("kvp_user", ["root", "Root", "-x", "a" * 32]),
        ("kvp_vllm_env", [{"HF_TOKEN": "x"}, {"OPENAI_APIKEY": "x"}, {"DB_PASS": "x"}, {"HF_TOKEN_2": "x"}]),
        ("kvp_vllm_docker_args", [["--env", "HF_TOKEN=x"], ["-eGH_PAT"], ["--env=A_KEYS=x"]]),
        ("kvp_vllm_gpus", ["device=0,1", "--x", 0, "0"]),
        ("kvp_vllm_memory", [200, "200", "64x"]),
        ("kvp_vllm_host", ["--privileged"]),
        ("kvp_lmcache_python", ["-c"]),
        ("kvp_storage_device", ["/dev/../etc/passwd"]),
        ("kvp_l2_size_gb", [10**400]),
        ("kvp_vllm_model_dir", ["/srv/a:b", "/srv/a b", "models", "/srv/../etc"]),
        ("kvp_lmcache_extra_args", [["a b"], ["$X"], ["%i"], "--x"]),
        ("kvp_storage_mount_options", ["a b", "#x", "", "a\\040b"]),
    ],
)
def test_near_misses_are_refused(name, values):
    for value in values:
        assert variables.problems({name: value}), value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kvp_vllm_port", [1, "65535"]),
        ("kvp_l1_size_gb", [64, "0.5", 0.25]),
        ("kvp_vllm_env", [{"A": "\n'$", "B": 1, "C": True, "D": 0.5, "E": ""}]),
        ("kvp_vllm_extra_args", [["--a", 1, '{"a": "ключ"}']]),
        ("kvp_vllm_model_dir", ["/srv/models--X--Y/snapshots/" + "0" * 40 + "/"]),
        ("kvp_lmcache_direct_io", [True, "false", "yes", "on", 1, "0"]),
        ("kvp_vllm_gpus", ["", "all", '"device=0,1"', 2, "device=0:0", "device=MIG-GPU-1/2/0"]),
        ("kvp_vllm_memory", ["", "64g", "1.5g", "64GiB", "1t"]),
        ("kvp_vllm_docker_args", [["--volume", "/a b:/c", "--env", "TOKENIZER=x", "--shm-size", "1g"]]),
        ("kvp_vllm_env", [{"VLLM_MAX_TOKENS_": 1, "KEYS_OF": "x"}]),
        ("kvp_vllm_lmcache_wait", [0]),
        ("kvp_cache_root", ["/var/lib/kvpersist", "/mnt/nvme/kv", "/data", "/opt/x"]),
    ],
)
def test_what_people_write_is_taken(name, values):
    for value in values:
        assert variables.problems({name: value}) == []


def test_a_name_that_no_role_reads_is_refused_with_the_nearest():
    (line,) = variables.problems({"kvp_vllm_conainer_name": "x"})
    assert line == "kvp_vllm_conainer_name is no variable of this collection; did you mean kvp_vllm_container_name?"
    assert variables.problems(dict.fromkeys(PINS, "") | {"kvp_hosts": "x", "kvp_my_own": 1}) == []


def test_secrets_are_not_quoted():
    for name in ("kvp_vllm_env", "kvp_vllm_docker_args", "kvp_lmcache_index_args", "kvp_vllm_api_key_file"):
        for value in ({"HF_TOKEN": "s3cret\0"}, "s3cret"):
            (line,) = variables.problems({name: value})
            assert "s3cret" not in line
