#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Say what is on a block device and on its mount point, without changing either."""

from __future__ import annotations

DOCUMENTATION = r"""
module: storage_probe
short_description: Say what is on a block device and on its mount point
version_added: 0.1.0
description:
  - Tells whether a block device may become the home of a cache, and whether its mount point is free for it.
  - Reads only. Nothing is mounted, written or formatted, in check mode or out of it.
author:
  - sikkatu (@sikkatu)
attributes:
  check_mode:
    support: full
    description: The module never changes anything.
  diff_mode:
    support: none
    description: There is never a difference to show.
  platform:
    support: full
    platforms: linux
    description: Linux with util-linux 2.34 or newer (C(findfs), C(lsblk), C(wipefs)).
options:
  device:
    description: Path of the block device.
    type: path
    required: true
  filesystem:
    description: The filesystem that the device should carry.
    type: str
    choices: [xfs, ext4]
    required: true
  mount:
    description: Directory that the device should be mounted at.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Look at the device
  sikkatu.kvpersist.storage_probe:
    device: /dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_AWS1234
    filesystem: xfs
    mount: /var/lib/kvpersist
  register: probe

- name: Refuse a device that holds something else
  ansible.builtin.assert:
    that: probe.state in ['blank', 'wanted']
    fail_msg: "{{ probe.description }}\n{{ probe.report }}"
"""

RETURN = r"""
state:
  description:
    - V(blank), no known signature at all.
    - V(wanted), exactly one signature, the wanted filesystem, and nobody else uses it.
    - V(foreign), any other or any second signature.
    - V(in_use), mounted elsewhere, swap, held by LVM, RAID or the device mapper, or promised to another
      place by C(/etc/fstab).
    - V(missing), no such path, not a block device, or a device without a medium.
  type: str
  returned: always
description:
  description: The reason for RV(state), for people.
  type: str
  returned: always
uuid:
  description: UUID of the wanted filesystem; empty in every other RV(state).
  type: str
  returned: always
mount_state:
  description:
    - V(mounted), the device is mounted there.
    - V(free), an empty directory or none yet.
    - V(taken), something else is mounted there.
    - V(claimed), C(/etc/fstab) mounts something else there.
    - V(shadowed), not mounted and not empty, so mounting would hide files.
    - V(invalid), not a directory, or a path that leads through a symbolic link.
  type: str
  returned: always
mount_description:
  description: The reason for RV(mount_state), for people.
  type: str
  returned: always
stale_source:
  description:
    - What C(/etc/fstab) mounts at the mount point although no device has it any more; empty without such a line.
    - With a blank device, this is the mark of a disk that was emptied behind the host's back.
  type: str
  returned: always
can_format:
  description: Whether the tool that makes the wanted filesystem is installed.
  type: bool
  returned: always
report:
  description: What C(lsblk) and C(wipefs) show of the device; of all block devices where it is missing.
  type: str
  returned: always
"""

import errno
import json
import os
import stat
import time
from itertools import islice
from typing import Any, NamedTuple

from ansible.module_utils.basic import AnsibleModule

BY_ID = "/dev/disk/by-id"
COLUMNS = "NAME,SIZE,TYPE,FSTYPE,LABEL,UUID,MOUNTPOINT"
MIB = 1 << 20


class Signature(NamedTuple):
    """One line of wipefs."""

    type: str
    uuid: str


class FstabLine(NamedTuple):
    """A line of fstab; device is what its source resolves to, "" for nothing that is there."""

    source: str
    path: str
    device: str


class Device(NamedTuple):
    """What was read of a device; path is its kernel name, number its major:minor."""

    path: str
    number: str
    size: int
    busy: bool
    blank_start: bool
    signatures: list[Signature]


class Mount(NamedTuple):
    """A line of mountinfo."""

    number: str
    root: str
    path: str
    source: str


class Verdict(NamedTuple):
    """A state and the reason for it."""

    state: str
    description: str


def parse_mountinfo(text: str) -> list[Mount]:
    """Mounts in the order in which they were made: the last one at a path is the visible one."""
    mounts = []
    for line in text.splitlines():
        fields = line.split()
        mounts.append(Mount(fields[2], fields[3], fields[4], fields[fields.index("-") + 2]))
    return mounts


def parse_fstab(text: str) -> list[tuple[str, str]]:
    """(source, mount point) of each line that is one."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [(fields[0], fields[1]) for fields in lines if len(fields) >= 4]


def classify_device(
    device: Device, filesystem: str, mount: str, mounts: list[Mount], fstab: list[FstabLine]
) -> Verdict:
    """Whether the device is free to be used, and what it takes."""
    if not device.size:
        return Verdict("missing", "it has no medium (its size is 0)")
    places = [m.path for m in mounts if m.number == device.number]
    if places and mount not in places:
        return Verdict("in_use", f"it is mounted at {', '.join(places)}")
    if device.busy and not places:
        return Verdict("in_use", "it is in use, by swap, LVM, RAID, the device mapper or a mount of a partition")
    promised = [line.path for line in fstab if line.device == device.path and line.path != mount]
    if promised:
        return Verdict("in_use", f"/etc/fstab uses it for {', '.join(promised)}")
    found = [signature.type for signature in device.signatures]
    if not found:
        start = "its first MiB is all zeros" if device.blank_start else "but its first MiB is not empty"
        return Verdict("blank", f"it carries no known signature, {start}")
    if found == [filesystem]:
        return Verdict("wanted", f"it carries one {filesystem} filesystem and nothing else")
    return Verdict("foreign", f"it carries {' and '.join(dict.fromkeys(found))}, not one {filesystem} filesystem alone")


def classify_mount(
    device: Device, mount: str, real_path: str, entries: list[str] | None, mounts: list[Mount], fstab: list[FstabLine]
) -> Verdict:
    """Whether the device is, or can be, mounted at the mount point.

    entries are the first names in that directory; None where the path is something else than a directory.
    """
    if real_path != mount:
        return Verdict("invalid", f"it leads through a symbolic link to {real_path}")
    if entries is None:
        return Verdict("invalid", "it exists and is not a directory")
    for line in fstab:
        if line.path.rstrip("/") != mount or (line.device == device.path and line.path == mount):
            continue
        # On a blank device, a line that leads nowhere is what its former filesystem left behind.
        if line.device or line.path != mount or device.signatures:
            return Verdict("claimed", f"/etc/fstab mounts {line.source} at {line.path}")
    visible = [m for m in mounts if m.path == mount][-1:]
    if visible and (visible[0].number, visible[0].root) != (device.number, "/"):
        return Verdict("taken", f"{visible[0].source} is mounted there")
    if visible:
        return Verdict("mounted", "the device is mounted there")
    if entries:
        return Verdict("shadowed", f"nothing is mounted there and it is not empty (it holds {', '.join(entries)})")
    return Verdict("free", "it is free")


class Probe:
    """Reads the facts from the host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module

    def device(self, path: str, mounts: list[Mount]) -> Device:
        """Read a path that is known to be a block device."""
        info = os.stat(path)
        number = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
        busy = any(m.number == number for m in mounts) or claimed(path)
        with open(path, "rb", buffering=0) as raw:
            size = raw.seek(0, os.SEEK_END)
            raw.seek(0)
            blank_start = not any(raw.read(MIB))
        return Device(os.path.realpath(path), number, size, busy, blank_start, self.signatures(path) if size else [])

    def signatures(self, path: str) -> list[Signature]:
        """What libblkid recognises on the device; wipefs lists everything, also what blkid finds ambiguous."""
        _rc, out, _err = self.module.run_command(["wipefs", "--no-act", "--json", path], check_rc=True)
        found = json.loads(out) if out.strip() else {}
        return [Signature(item["type"], item.get("uuid") or "") for item in found.get("signatures", [])]

    def resolve(self, source: str) -> str:
        """What an fstab source stands for: a kernel name, "" for a device that is not there."""
        tag = source.partition("=")[0]
        if tag in ("UUID", "LABEL", "PARTUUID", "PARTLABEL"):
            rc, out, _err = self.module.run_command(["findfs", source.replace('"', "")])
            return os.path.realpath(out.strip()) if rc == 0 else ""
        if source.startswith("/dev/"):
            return os.path.realpath(source) if os.path.exists(source) else ""
        return source

    def show(self, *command: str) -> str:
        """What a command prints, for people."""
        return str(self.module.run_command(list(command))[1])

    def report(self, path: str) -> str:
        """What is on the device, for people."""
        return self.show("lsblk", "-o", COLUMNS, path) + self.show("wipefs", "--no-act", path)

    def choices(self) -> str:
        """All block devices and their stable names, for people."""
        links = sorted(os.listdir(BY_ID)) if os.path.isdir(BY_ID) else []
        lines = [f"{BY_ID}/{link} -> {os.path.realpath(os.path.join(BY_ID, link))}\n" for link in links]
        return self.show("lsblk", "-o", COLUMNS) + "".join(lines)


def claimed(path: str) -> bool:
    """The kernel's own answer to "does anybody hold it": the claim that mount, swap, LVM and RAID make.

    A claim of less than a second is a scan, or what is left of a mount that was just undone.
    """
    for _try in range(5):
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_EXCL))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(0.2)
        else:
            return False
    return True


def read(path: str) -> str:
    """A text file; empty where there is none."""
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8", errors="surrogateescape") as text:
        return text.read()


def first_names_in(path: str) -> list[str] | None:
    """Three names in a directory, none where it does not exist, None where it is something else."""
    if not os.path.lexists(path):
        return []
    if not os.path.isdir(path):
        return None
    with os.scandir(path) as entries:
        return [entry.name for entry in islice(entries, 3)]


def examine(module: AnsibleModule) -> dict[str, Any]:
    """The module's result."""
    path, filesystem, mount = (module.params[name] for name in ("device", "filesystem", "mount"))
    probe = Probe(module)
    result: dict[str, Any] = {"uuid": "", "stale_source": "", "mount_state": "free", "mount_description": ""}
    result["can_format"] = module.get_bin_path(f"mkfs.{filesystem}") is not None
    if not os.path.exists(path):
        return {**result, "state": "missing", "description": "there is no such path", "report": probe.choices()}
    if not stat.S_ISBLK(os.stat(path).st_mode):
        return {**result, "state": "missing", "description": "it is not a block device", "report": probe.choices()}
    if os.path.realpath(path) == path:
        module.warn(
            f"{path} is a kernel name, which can belong to another disk after a restart; name the device by its "
            f"link in {BY_ID} where it has one."
        )

    mounts = parse_mountinfo(read("/proc/self/mountinfo"))
    device = probe.device(path, mounts)
    fstab = [FstabLine(source, at, probe.resolve(source)) for source, at in parse_fstab(read("/etc/fstab"))]
    on_device = classify_device(device, filesystem, mount, mounts, fstab)
    at_mount = classify_mount(device, mount, os.path.realpath(mount), first_names_in(mount), mounts, fstab)
    if on_device.state == "wanted":
        result["uuid"] = device.signatures[0].uuid
    result["stale_source"] = next((line.source for line in fstab if line.path == mount and not line.device), "")
    return {
        **result,
        **on_device._asdict(),
        "mount_state": at_mount.state,
        "mount_description": at_mount.description,
        "report": probe.report(path) if device.size else probe.choices(),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "device": {"type": "path", "required": True},
            "filesystem": {"type": "str", "required": True, "choices": ["xfs", "ext4"]},
            "mount": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    module.run_command_environ_update = {"LC_ALL": "C"}
    try:
        module.exit_json(changed=False, **examine(module))
    except OSError as error:
        module.fail_json(msg=f"Could not look at {module.params['device']}: {error}")


if __name__ == "__main__":
    main()
