"""Keys and certificates of a deployment. A private key is made where it is used, and is readable by its owner alone."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomic

DAYS = 5 * 365  # that certificates are valid
PEM, OPENSSH = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH


@dataclass(frozen=True)
class Authority:
    """A certificate authority that exists to sign the two certificates of one server."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, name: str) -> "Authority":
        """Make an authority that can sign servers, and no other authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(f"{name} authority")
        builder = _certificate(subject, subject, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    def issue(self, folder: Path, *hosts: str) -> None:
        """Write `server.key` and `server.pem` of a server that is called by these names or addresses."""
        key, public = ec.generate_private_key(ec.SECP256R1()), self.key.public_key()
        builder = _certificate(_subject(hosts[0]), self.certificate.subject, key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_name, hosts))), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        write_key(folder / "server.key", key)
        write_atomic(folder / "server.pem", builder.sign(self.key, hashes.SHA256()).public_bytes(PEM))


def write_key(file: Path, key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat | None = None) -> None:
    """Write a private key that only its owner can read."""
    format = format or serialization.PrivateFormat.PKCS8
    write_atomic(file, key.private_bytes(PEM, format, serialization.NoEncryption()), private=True)


def new_site_key(folder: Path) -> None:
    """Write `key` and `key.pub` of a site, in the form that Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_key(folder / "key", key, OPENSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_atomic(folder / "key.pub", public + b"\n")


def read_site_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key. One that others can read is refused."""
    try:
        if file.stat().st_mode & 0o077:
            raise FedsieveError(f"{file}: others than its owner may read this key: chmod 600 {file}")
        key = serialization.load_ssh_private_key(file.read_bytes(), None)
    except FileNotFoundError:
        raise FedsieveError(f"{file} is not there: `fedsieve node init` makes it") from None
    except ValueError:
        raise FedsieveError(f"{file} is no private key: `fedsieve node init` makes one") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedsieveError(f"{file} is not an elliptic-curve key: `fedsieve node init` makes one")
    return key


def fingerprint(file: Path) -> str:
    """A digest of a public file, to compare by telephone."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(file.read_bytes().strip())
    return digest.finalize().hex()


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _name(host: str) -> x509.GeneralName:
    """A name or an address, as a certificate has it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    begin, end = now - datetime.timedelta(hours=1), now + datetime.timedelta(days=DAYS)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), begin, end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
