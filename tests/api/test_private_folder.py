"""What others planted where a cache is to be is neither read nor written to; nor is what does not look like a cache."""

from __future__ import annotations

import grp
import json
import logging
import os
import pwd
import shutil
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fzero import private_folder
from fzero._torch_compat import inductor_cache_dir
from fzero.compile import fault_report, kept_lowerings
from fzero.compile.fault_report import Report
from fzero.cost import kept_costs
from fzero.cost.kept_costs import Costs
from fzero.runtime import compile_segments

A, B = {"torch": 1.0, "onednn": 2.0}, {"torch": 3.0, "onednn": 1.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of this user's, at which links point."""
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "victim"


def kept(caplog: pytest.LogCaptureFixture) -> str:
    """Asks for a figure twice, in what could be two runs; what was said meanwhile. It is measured in each."""
    with caplog.at_level(logging.WARNING, "fzero"):
        for figures in (B, A):
            assert Costs("test").find(["a"], lambda q, figures=figures: figures) == {"a": figures}
    return caplog.text


def test_the_folder_and_its_files_are_this_users_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        kept_costs.remember("test", {"a": A})
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in cache.iterdir()} == {0o600}
    assert kept_costs.read("test") == {"a": A}


@pytest.mark.parametrize("mask", [0, 0o002])
def test_the_folder_of_a_first_lowering_is_this_users_alone(cache: Path, mask: int, caplog: Any) -> None:
    """It lies in that of the figures, which may not be there yet, on a machine whose users share a group."""
    for write in (lambda: kept_lowerings._write("a" * 32, b"{}"), lambda: fault_report.write(Report("", {}, {}))):
        before = os.umask(mask)
        try:
            write()
        finally:
            os.umask(before)
        assert {stat.S_IMODE(place.stat().st_mode) for place in (cache, *cache.iterdir())} == {0o700}
        kept_costs.remember("test", {"a": A})
        assert kept_costs.read("test") == {"a": A}
        shutil.rmtree(cache)
    assert not caplog.text


def test_a_child_that_was_forked_meanwhile_holds_no_lock(tmp_path: Path) -> None:
    """As a worker of a DataLoader, which lives as long as the run."""
    end, other_end = os.pipe()
    with private_folder.folder(tmp_path / "place", make=True) as place:
        with private_folder.locked(place, "a.lock"):
            child = os.fork()
            if child == 0:
                os.close(other_end)
                os.read(end, 1)  # until the test is over
                os._exit(0)
        began = time.monotonic()
        with private_folder.locked(place, "a.lock", 5.0):
            waited = time.monotonic() - began
    for descriptor in (end, other_end):
        os.close(descriptor)
    os.waitpid(child, 0)
    assert waited < 4.0


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_place_of_the_lock_empties_nothing(cache: Path, victim: Path, dangling: bool, caplog: Any) -> None:
    cache.mkdir(mode=0o700)
    target = victim.with_name("new") if dangling else victim
    kept_costs.path_of("test").with_suffix(".lock").symlink_to(target)
    assert "figures are measured in every run" in kept(caplog)
    assert victim.read_text() == "precious"
    assert not victim.with_name("new").exists()


def test_a_link_in_place_of_the_file_is_replaced_and_not_followed(cache: Path, victim: Path, caplog: Any) -> None:
    content = {"machine": kept_costs.machine(), "figures": {"a": B}}
    victim.write_text(json.dumps(content))
    cache.mkdir(mode=0o700)
    kept_costs.path_of("test").symlink_to(victim)
    with caplog.at_level(logging.WARNING, "fzero"):
        assert Costs("test").find(["a"], lambda q: A) == {"a": A}
    assert "is not what fzero wrote" in caplog.text
    assert json.loads(victim.read_text()) == content
    assert not kept_costs.path_of("test").is_symlink()
    assert kept_costs.read("test") == {"a": A}


def test_a_pipe_in_place_of_the_file_is_not_waited_for(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    os.mkfifo(kept_costs.path_of("test"))
    assert kept_costs.read("test") == {}


def test_a_folder_that_is_a_link_is_not_used(cache: Path, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "other")
    text = kept(caplog)
    assert text.count("figures are measured in every run") == 1, "it is said once"
    assert "it is a link or no folder, needed a folder" in text
    assert list((tmp_path / "other").iterdir()) == []


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The user "ada" and her group, as the system's tables are to tell them."""
    told: dict[str, Any] = {"pw_name": "ada", "pw_gid": 1000, "gr_name": "ada", "gr_mem": []}
    fstat = os.fstat
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(**told))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(**told))
    monkeypatch.setattr(os, "fstat", lambda fd: of_group(fstat(fd), told["pw_gid"]))
    return told


def of_group(found: os.stat_result, gid: int) -> os.stat_result:
    return os.stat_result((*found[:5], gid, *found[6:]))


@pytest.mark.parametrize("mode", [0o775, 0o770])
def test_a_group_of_this_user_alone_is_no_other_user(cache: Path, mode: int, group: dict[str, Any]) -> None:
    """As a umask of 0002 leaves folders."""
    kept_costs.remember("test", {"a": A})
    cache.chmod(mode)
    assert private_folder.refused(cache) == ""
    assert kept_costs.read("test") == {"a": A}


@pytest.mark.parametrize("other", [{"gr_name": "users"}, {"gr_mem": ["ada", "bob"]}, {"pw_gid": 0}])
def test_a_group_of_several_is(cache: Path, group: dict[str, Any], other: dict[str, Any]) -> None:
    kept_costs.remember("test", {"a": A})
    cache.chmod(0o775)
    group.update(other)
    assert "other users may write to it" in private_folder.refused(cache)


def test_a_group_by_an_access_list_is(cache: Path, group: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kept_costs.remember("test", {"a": A})
    cache.chmod(0o775)
    monkeypatch.setattr(os, "listxattr", lambda fd: ["system.posix_acl_access"], raising=False)
    assert "other users may write to it" in private_folder.refused(cache)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_figures_in_a_folder_that_others_may_write_to_are_not_believed(
    cache: Path, mode: int, caplog: Any, group: dict[str, Any]
) -> None:
    group["gr_mem"] = ["bob"]
    kept_costs.remember("test", {"a": {"torch": 9.0, "onednn": 9.0}})
    cache.chmod(mode)
    text = kept(caplog)
    assert text.count("figures are measured in every run") == 1
    assert "other users may write to it: chmod go-w" in text
    assert stat.S_IMODE(cache.stat().st_mode) == mode, "it may be a folder that is to be so, as /tmp"


def test_figures_of_another_user_are_not_believed(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    kept_costs.remember("test", {"a": {"torch": 9.0, "onednn": 9.0}})
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    text = kept(caplog)
    assert text.count("figures are measured in every run") == 1
    assert f"it belongs to user {other - 1}, not to {other}" in text


def test_a_foreign_file_in_a_folder_of_ones_own_is_not_believed(cache: Path, caplog: Any) -> None:
    """As it stays behind in a folder that others could write to once."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    kept_costs.remember("test", {"a": {"torch": 9.0, "onednn": 9.0}})
    os.chown(kept_costs.path_of("test"), 65534, 65534)
    with caplog.at_level(logging.WARNING, "fzero"):
        assert kept_costs.read("test") == {}
    assert "belongs to user 65534" in caplog.text


@pytest.mark.parametrize(
    "figures",
    [
        {"a": {"torch": "1.0"}},
        {"a": {"torch": True}},
        {"a": {"torch": 1e300}},
        {"a": {"torch": float("inf")}},
        {"a": {"torch": None}},
        {"a": [["torch", 1.0]]},
        [["a", {"torch": 1.0}]],
    ],
)
def test_what_is_no_figure_is_not_believed(cache: Path, figures: Any) -> None:
    cache.mkdir(mode=0o700)
    kept_costs.path_of("test").write_text(json.dumps({"machine": kept_costs.machine(), "figures": figures}))
    assert kept_costs.read("test") == {}
    assert Costs("test").find(["a"], lambda q: A) == {"a": A}


def test_a_file_that_is_too_long_or_too_deep_is_not_believed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_costs.remember("test", {"a": A})
    monkeypatch.setattr(kept_costs, "MAX_BYTES", 10)
    assert kept_costs.read("test") == {}
    kept_costs.path_of("test").write_text("[" * 100_000)
    monkeypatch.setattr(kept_costs, "MAX_BYTES", 1 << 20)
    assert kept_costs.read("test") == {}


def test_a_disk_without_space_leaves_what_was_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept_costs.remember("test", {"a": A})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fzero"):
        patch.setattr(os, "rename", full)
        assert kept_costs.remember("test", {"b": B}) == {"b": B}
    assert "No space left on device" in caplog.text
    assert kept_costs.read("test") == {"a": A}
    assert sorted(file.suffix for file in cache.iterdir()) == [".json", ".lock"]


def test_code_that_others_may_have_written_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "inductor"
    assert compile_segments._foreign(str(folder)) == ""
    folder.mkdir()
    assert compile_segments._foreign(str(folder)) == ""
    folder.chmod(0o777)
    assert "is not used: other users may write to it" in compile_segments._foreign(str(folder))
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert "it is a link" in private_folder.refused(folder)


def test_inductors_folder_under_a_shared_group_is_made_this_users(
    tmp_path: Path, group: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch makes it by the umask, some releases when they are imported; empty it holds no code of others."""
    group["gr_mem"] = ["bob"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    before = os.umask(0o002)
    try:
        folder = Path(inductor_cache_dir())
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775
    assert compile_segments._foreign(str(folder)) == ""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    folder.chmod(0o775)
    (folder / "code").touch()
    assert "is not used: other users may write to it" in compile_segments._foreign(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775
