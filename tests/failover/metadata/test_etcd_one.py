"""The client of etcd passes the conformance suite with one member.

One member and three are files of their own, so that workers share them: most of the time goes
by waiting for leases to run out.
"""

from __future__ import annotations

import pytest
from metastore_suite import MetaStoreSuite

from support.etcd_members import EtcdHarness, EtcdMembers


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    etcd = EtcdMembers(tmp_path_factory.mktemp("etcd"), 1)
    yield etcd
    etcd.close()


class TestOneMember(MetaStoreSuite):
    @pytest.fixture
    def harness(self, etcd):
        harness = EtcdHarness(etcd)
        yield harness
        harness.close()
