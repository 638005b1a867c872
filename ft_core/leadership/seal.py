"""What is kept for a job says who has written it: others may be able to write there, and lead nobody astray.

Who can write there can delete what is there, and write again what was there before: so that nobody leads for
as long as he does. He cannot end the job, nor send its nodes elsewhere.
"""

from __future__ import annotations

import hmac


class Seal:
    """Seals what one job's processes write, by a key that only they have."""

    def __init__(self, key: str, name: str) -> None:
        """`name`: of the job, where this is kept."""
        self._key = hmac.digest(key.encode(), b"lease " + name.encode(), "sha256")

    def of(self, what: str, *texts: str) -> str:
        """The seal of these texts, which are `what` is said."""
        digest = hmac.new(self._key, digestmod="sha256")
        for text in (what, *texts):
            digest.update(b"%d:" % len(text.encode()) + text.encode())
        return digest.hexdigest()

    def fits(self, seal: str, what: str, *texts: str) -> bool:
        """Whether a process of this job has said so."""
        return hmac.compare_digest(seal.encode(), self.of(what, *texts).encode())
