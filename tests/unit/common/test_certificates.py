"""The deny list of certificates, and what ends by itself."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from gpuscale.common import errors
from gpuscale.common.security import certificates
from gpuscale.common.security.certificate_authority import CertificateSubject, Pair, issue, make_authority
from gpuscale.common.security.certificates import CertificateCheck, first_to_end
from tests.support.certificates import Authority


@pytest.fixture(scope="module")
def authority() -> Pair:
    return make_authority("test")


def pem(pair: Pair) -> bytes:
    return pair.certificate.public_bytes(Encoding.PEM)


def verdict(check: CertificateCheck, shown: bytes) -> str:
    try:
        check.check(shown)
    except errors.UnauthenticatedError as error:
        return error.reason
    return ""


def test_a_certificate_is_refused_by_its_serial_or_by_its_name_and_age(
    tmp_path: Path, authority: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "CHECK_PERIOD", 0.0)
    now = datetime.now(UTC)
    uri = "spiffe://lab/gpuscale/agent/gpu-07"
    old, other, server = (
        issue(authority, subject, 7)
        for subject in (
            CertificateSubject("gpu-07", uri=uri),
            CertificateSubject("gpu-07", uri=f"{uri}0"),
            CertificateSubject("s", ("s",)),
        )
    )
    new = issue(authority, CertificateSubject("gpu-07", uri=uri), 7, begins=now)
    pairs = [pem(one) for one in (old, new, other, server)]
    file = tmp_path / "revoked.toml"
    file.write_text("")
    check = CertificateCheck(file)
    assert [verdict(check, one) for one in pairs] == ["", "", "", ""]
    file.write_text(f"[names]\ngpu-07 = {now.replace(microsecond=0).isoformat()}\n")
    assert [verdict(check, one) for one in pairs] == ["CERTIFICATE_REVOKED", "", "", ""]
    serial = f"{server.certificate.serial_number:X}"
    serial = ":".join(serial[at : at + 2] for at in range(0, len(serial), 2))
    file.write_text(f'[serials]\n"{serial}" = {now.isoformat()}\n')
    assert [verdict(check, one) for one in pairs] == ["", "", "", "CERTIFICATE_REVOKED"]
    file.write_text("[serials]\nxyz = 1")  # a bad change
    assert verdict(check, pairs[3]) == "CERTIFICATE_REVOKED"


def test_a_certificate_that_ends_while_its_connection_lasts_counts_no_more(tmp_path: Path) -> None:
    ended = Authority(tmp_path).expired_server(days=-0.001).cert_file.read_bytes()
    assert verdict(CertificateCheck(None), ended) == "CERTIFICATE_EXPIRED"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[names]\na = 1999", "names.a"),
        ("[names]\na = 2026-11-23T10:00:00", "timezone"),
        ("[serials]\nzz = 2026-11-23T10:00:00Z", "serials.zz"),
        ("[name]", "name"),
        ("[[", "end of document"),
        (None, "No such file"),
    ],
)
def test_deny_lists_that_cannot_be_used(tmp_path: Path, text: str | None, problem: str) -> None:
    file = tmp_path / "revoked.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(errors.FailedPreconditionError) as caught:
        CertificateCheck(file)
    assert caught.value.reason == "REVOKED_FILE"
    assert str(file) in caught.value.message
    assert problem in caught.value.message


def test_of_a_bundle_the_one_that_ends_first_is_told(authority: Pair) -> None:
    short = issue(authority, CertificateSubject("s", ("s",)), 1)
    assert first_to_end(pem(authority) + pem(short)).ends == short.certificate.not_valid_after_utc.timestamp()
