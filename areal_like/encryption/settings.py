"""The section `encryption`: where the key of a run is found. The key itself is never part of a configuration."""

from __future__ import annotations

from pydantic import Field, model_validator

from areal_like.settings import Settings


class EncryptionSettings(Settings):
    """Encrypt the data of the run at rest (extra `[encryption]`). Exactly one of `key_file` and `key_env` is set.

    The key is 32 random bytes as 64 hexadecimal digits or in Base64, such as the output of `openssl rand -hex 32`.
    """

    key_file: str | None = Field(None, min_length=1)
    """File with the key, which not every user can read; not in `runs_dir`."""
    key_env: str | None = Field(None, min_length=1, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable with the key. Programs that the run starts inherit it."""

    @model_validator(mode="after")
    def _one_place(self) -> EncryptionSettings:
        if (self.key_file is None) == (self.key_env is None):
            raise ValueError("set either `key_file` or `key_env`")
        return self
