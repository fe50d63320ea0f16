"""Keys of ECDSA in PEM files: P-256 with SHA-256, P-384 with SHA-384, P-521 with SHA-512.

    openssl ecparam -name prime256v1 -genkey -noout -out key.pem && openssl ec -in key.pem -pubout -out key.pub

These curves and hashes are those of `model_signing` 1.1.1 (`_signing/sign_ec_key.py`), and so is the hint by which a
bundle names its key: the SHA-256 of the public key as PEM. An encrypted private key is opened with the passphrase in
`CKPT_SIGN_PASSWORD`; none is ever given on a command line, which others can read. The arithmetic is the `cryptography`
package's (extra `sign`), loaded when a key is.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt_tool.core.installation import install_command
from ckpt_tool.errors import UsageError, wrap_os_error

PASSWORD = "CKPT_SIGN_PASSWORD"
KEY_LIMIT = 64 << 10  # bytes
_HASHES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}  # curve -> what is hashed with


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key that verifies signatures."""

    hint: str  # the SHA-256, in hex, of the key as PEM
    _key: Any

    def made(self, signature: bytes, data: bytes) -> bool:
        """Is this the signature, in DER, of the data by this key?"""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data, _ecdsa(self._key))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A key that signs."""

    public: PublicKey
    _key: Any

    def sign(self, data: bytes) -> bytes:
        """A signature in DER: the same for the same data (RFC 6979), where OpenSSL can (3.2 and later)."""
        return bytes(self._key.sign(data, _ecdsa(self._key, deterministic=True)))


def private_key(path: str) -> PrivateKey:
    """The key of `--sign`. Raises UsageError E1680 without the package, E1681 for what is no such key, StorageError."""
    _, serialization = _package()
    raw = _read(path)
    password = os.environ.get(PASSWORD)
    encrypted = b"ENCRYPTED" in raw
    if encrypted and password is None:
        raise _unfit(path, "the private key is encrypted", f"set {PASSWORD} to its passphrase")
    try:
        key = serialization.load_pem_private_key(raw, password.encode() if encrypted and password else None)
    except (ValueError, TypeError) as e:
        wrong = f"it does not open with the passphrase in {PASSWORD}" if encrypted else "it is no private key in PEM"
        raise _unfit(path, wrong, _MAKE) from e
    except _get_unsupported_error() as e:
        raise _unfit(path, str(e), _MAKE) from e
    return PrivateKey(_public(path, key), key)


def public_key(path: str) -> PublicKey:
    """The key of `--key`. Raises as `private_key`."""
    _, serialization = _package()
    try:
        key = serialization.load_pem_public_key(_read(path))
    except ValueError as e:
        raise _unfit(path, "it is no public key in PEM", "openssl ec -in key.pem -pubout -out key.pub makes it") from e
    except _get_unsupported_error() as e:
        raise _unfit(path, str(e), _MAKE) from e
    return _check_key(path, key)


_MAKE = "openssl ecparam -name prime256v1 -genkey -noout -out key.pem makes one"


def _public(path: str, key: Any) -> PublicKey:
    """The public half of a private key."""
    return _check_key(path, key.public_key())


def _check_key(path: str, key: Any) -> PublicKey:
    """The public key with its hint. Raises UsageError E1681 for keys that are not ECDSA on a known curve."""
    _, serialization = _package()
    curve = getattr(getattr(key, "curve", None), "name", "")
    if curve not in _HASHES:
        kind = f"on {curve}" if curve else f"a {type(key).__name__.removesuffix('PublicKey').lstrip('_')}"
        raise _unfit(path, f"the key is {kind}, want ECDSA on {', '.join(_HASHES)}", _MAKE)
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PublicKey(hashlib.sha256(pem).hexdigest(), key)


def _ecdsa(key: Any, *, deterministic: bool = False) -> Any:
    """The algorithm for a key's curve. Old versions of `cryptography` or OpenSSL have no deterministic signatures."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    hashing = getattr(hashes, _HASHES[key.curve.name])()
    if deterministic:
        with suppress(TypeError, _get_unsupported_error()):
            return ec.ECDSA(hashing, deterministic_signing=True)
    return ec.ECDSA(hashing)


def _package() -> tuple[Any, Any]:
    """Modules of the `cryptography` package. Raises UsageError E1680 if it is not installed."""
    try:
        from cryptography.hazmat.primitives import hashes, serialization
    except ImportError as e:
        raise UsageError("signatures need the cryptography package", code="E1680", hint=install_command("sign")) from e
    return hashes, serialization


def _get_unsupported_error() -> type[Exception]:
    from cryptography.exceptions import UnsupportedAlgorithm

    error_type: type[Exception] = UnsupportedAlgorithm
    return error_type


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(KEY_LIMIT)
    except OSError as e:
        raise wrap_os_error(e, path, "reading the key") from e


def _unfit(path: str, why: str, hint: str) -> UsageError:
    """The error E1681 for a file that is no usable key."""
    return UsageError(f"no key to sign or to check with: {why}", code="E1681", path=path, hint=hint)
