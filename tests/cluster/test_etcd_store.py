"""The client of etcd passes the conformance suite, with one member and with three."""

from __future__ import annotations

import pytest
from metastore_suite import MetaStoreSuite

from support.etcd_harness import EtcdHarness
from support.etcd_members import EtcdMembers


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    etcd = EtcdMembers(tmp_path_factory.mktemp("one"))
    yield etcd
    etcd.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    etcd = EtcdMembers(tmp_path_factory.mktemp("three"), 3)
    yield etcd
    etcd.close()


class TestOneMember(MetaStoreSuite):
    @pytest.fixture
    def harness(self, one):
        harness = EtcdHarness(one)
        yield harness
        harness.close()


class TestThreeMembers(MetaStoreSuite):
    @pytest.fixture
    def harness(self, three):
        harness = EtcdHarness(three)
        yield harness
        harness.close()
