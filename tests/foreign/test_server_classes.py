"""The server for tests in Node.js, Java and Go (examples/testing), as somebody who copied it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTING = ROOT / "examples" / "testing"
BIN = Path(sys.executable).parent

NODE = """
import { DcpdServer } from "./dcpd-server.mjs";
const server = await DcpdServer.start("--durability", "none");
const before = server.address;
console.log((await server.failover(92, 0)).seqno);
await server.kill();
await server.run();
console.log(server.address === before);
await server.post("vbuckets/5000/branch", { at: 1 }).catch((error) => console.log(error.message));
await server.close();
"""
JAVA = """
public class Try {
    public static void main(String[] arguments) throws Exception {
        try (DcpdServer server = new DcpdServer("--durability", "none")) {
            String before = server.address();
            System.out.println(server.failover(92, 0).contains("\\"seqno\\":0") ? "0" : "?");
            server.kill();
            server.start();
            System.out.println(server.address().equals(before));
            try {
                server.post("vbuckets/5000/branch", "{\\"at\\": 1}");
            } catch (java.io.IOException error) {
                System.out.println(error.getMessage());
            }
        }
    }
}
"""
GO = """package dcpdtest

import (
	"fmt"
	"strings"
	"testing"
)

func TestTry(t *testing.T) {
	server := Start(t, "--durability", "none")
	before := server.Address()
	if strings.Contains(server.Failover(92, 0), `"seqno":0`) {
		fmt.Println(0)
	}
	server.Kill()
	server.Run()
	fmt.Println(server.Address() == before)
}
"""

pytestmark = pytest.mark.foreign


def run(folder: Path, *command: str) -> str:
    """Run a command that the test needs; return what it printed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"the command {command[0]} is missing")
    made = folder / "made"
    made.mkdir(exist_ok=True)
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}", "TMPDIR": str(made),
        "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={made}",
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(made.glob("dcpd-test-*")) == [], "its folder is gone"
    return done.stdout


def copied(folder: Path, name: str, program: str, text: str) -> None:
    shutil.copy(TESTING / name, folder)
    (folder / program).write_text(text)


def test_the_server_in_node(tmp_path: Path) -> None:
    copied(tmp_path, "dcpd-server.mjs", "try.mjs", NODE)
    lines = run(tmp_path, "node", "try.mjs").splitlines()
    assert lines[:2] == ["0", "true"]
    assert lines[2].startswith("vbuckets/5000/branch: 4"), "a refusal has its reason"


def test_the_server_in_java(tmp_path: Path) -> None:
    copied(tmp_path, "DcpdServer.java", "Try.java", JAVA)
    run(tmp_path, "javac", "-Xlint:all,-processing", "-Werror", "DcpdServer.java", "Try.java")
    lines = run(tmp_path, "java", "-cp", ".", "Try").splitlines()
    assert lines[:2] == ["0", "true"]
    assert lines[2].startswith("vbuckets/5000/branch: 4")


@pytest.mark.timeout(600)
def test_the_server_in_go(tmp_path: Path) -> None:
    copied(tmp_path, "dcpd_server.go", "try_test.go", GO)
    (tmp_path / "go.mod").write_text("module dcpdtest\n\ngo 1.20\n")
    lines = run(tmp_path, "go", "test", "-v", "-vet=all", ".").splitlines()
    assert [line for line in lines if line in {"0", "true"}] == ["0", "true"]
