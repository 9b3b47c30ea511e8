"""What storage_probe makes of the facts; molecule/storage has it read real ones."""

from __future__ import annotations

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.modules import storage_probe as probe

DISK, MOUNT = "/dev/nvme1n1", "/var/lib/kvpersist"
XFS, EXT4 = probe.Signature("xfs", "1111-2222"), probe.Signature("ext4", "3333")
HERE = probe.Mount("259:1", "/", MOUNT, DISK)
THERE = probe.Mount("259:1", "/", "/data", DISK)
OTHER = probe.Mount("259:7", "/", MOUNT, "/dev/nvme7n1")


def disk(*signatures: probe.Signature, busy: bool = False, size: int = 1 << 40, zeros: bool = True) -> probe.Device:
    return probe.Device(DISK, "259:1", size, busy, zeros, list(signatures))


def line(source: str, path: str = MOUNT, device: str = DISK) -> probe.FstabLine:
    return probe.FstabLine(source, path, device)


@pytest.mark.parametrize(
    ("device", "mounts", "fstab", "state", "words"),
    [
        pytest.param(disk(), [], [], "blank", "its first MiB is all zeros", id="blank"),
        pytest.param(disk(zeros=False), [], [], "blank", "but its first MiB is not empty", id="unknown content"),
        pytest.param(disk(size=0), [], [], "missing", "no medium", id="no medium"),
        pytest.param(disk(XFS), [], [], "wanted", "one xfs filesystem", id="wanted"),
        pytest.param(disk(XFS, busy=True), [HERE], [], "wanted", "one xfs", id="mounted here"),
        pytest.param(disk(XFS, busy=True), [THERE, HERE], [], "wanted", "one xfs", id="mounted here as well"),
        pytest.param(disk(XFS), [], [line("UUID=1111-2222")], "wanted", "one xfs", id="line for here"),
        pytest.param(disk(EXT4), [], [], "foreign", "ext4, not one xfs", id="another filesystem"),
        pytest.param(disk(XFS, EXT4), [], [], "foreign", "xfs and ext4", id="two signatures"),
        pytest.param(disk(XFS, XFS), [], [], "foreign", "carries xfs, not one", id="two of the wanted one"),
        pytest.param(disk(XFS, busy=True), [THERE], [], "in_use", "mounted at /data", id="mounted elsewhere"),
        pytest.param(disk(XFS, busy=True), [], [], "in_use", "in use, by swap", id="held"),
        pytest.param(disk(busy=True), [], [], "in_use", "in use, by swap", id="held without a signature"),
        pytest.param(disk(XFS), [], [line("LABEL=a", "/data")], "in_use", "uses it for /data", id="line for elsewhere"),
        pytest.param(disk(), [], [line(DISK, "/data")], "in_use", "uses it for /data", id="blank, line for elsewhere"),
    ],
)
def test_device(
    device: probe.Device, mounts: list[probe.Mount], fstab: list[probe.FstabLine], state: str, words: str
) -> None:
    verdict = probe.classify_device(device, "xfs", MOUNT, mounts, fstab)
    assert verdict.state == state
    assert words in verdict.description


@pytest.mark.parametrize(
    ("device", "mounts", "fstab", "state"),
    [
        pytest.param(disk(XFS), [], [], "free", id="free"),
        pytest.param(disk(XFS), [HERE], [line("UUID=1111-2222")], "mounted", id="mounted"),
        pytest.param(disk(XFS), [OTHER, HERE], [], "mounted", id="mounted over another"),
        pytest.param(disk(XFS), [HERE, OTHER], [], "taken", id="another mounted over it"),
        pytest.param(disk(XFS), [HERE._replace(root="/sub")], [], "taken", id="a part of the device"),
        pytest.param(disk(XFS), [], [line("tmpfs", device="tmpfs")], "claimed", id="line of something else"),
        pytest.param(disk(XFS), [], [line("UUID=dead", device="")], "claimed", id="dead line, device with data"),
        pytest.param(disk(), [], [line("UUID=dead", device="")], "free", id="dead line, blank device"),
        pytest.param(disk(XFS), [], [line("UUID=1111-2222", MOUNT + "/")], "claimed", id="line spelt otherwise"),
        pytest.param(disk(XFS), [], [line("/dev/sdb", "/data", "/dev/sdb")], "free", id="line of another place"),
    ],
)
def test_mount(device: probe.Device, mounts: list[probe.Mount], fstab: list[probe.FstabLine], state: str) -> None:
    assert probe.classify_mount(device, MOUNT, MOUNT, [], mounts, fstab).state == state


@pytest.mark.parametrize(
    ("real_path", "entries", "state", "words"),
    [
        ("/data", [], "invalid", "symbolic link to /data"),
        (MOUNT, None, "invalid", "not a directory"),
        (MOUNT, ["precious"], "shadowed", "precious"),
    ],
)
def test_mount_point_itself(real_path: str, entries: list[str] | None, state: str, words: str) -> None:
    verdict = probe.classify_mount(disk(), MOUNT, real_path, entries, [], [])
    assert verdict.state == state
    assert words in verdict.description


def test_mountinfo() -> None:
    text = (
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
        "37 35 259:1 / /var/lib/kvpersist rw - xfs /dev/nvme1n1 rw\n"
    )
    assert probe.parse_mountinfo(text) == [probe.Mount("98:0", "/mnt1", "/mnt2", "/dev/root"), HERE]


def test_fstab() -> None:
    text = "# comment\n\nUUID=1 /a xfs defaults 0 0\n/dev/b /b ext4 ro # trailing\ntwo fields\n"
    assert probe.parse_fstab(text) == [("UUID=1", "/a"), ("/dev/b", "/b")]
