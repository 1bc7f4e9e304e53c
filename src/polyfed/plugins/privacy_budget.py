"""What a federation spends of its clients' privacy: noise for a target, the releases of a round, a budget kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyfed.core.method import Exchange
from polyfed.core.releases import Release
from polyfed.core.settings import Privacy
from polyfed.engine import accounting
from polyfed.engine.dp_sgd import check_dp_sgd
from polyfed.engine.dp_sgd import releases as of_training
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.plugin import Plugin, RoundRefused, Setup, find
from polyfed.engine.privacy_ledger import PrivacyLedger, to_record
from polyfed.engine.round_state import Records, Round
from polyfed.engine.uploads import has_upload
from polyfed.errors import ConfigError
from polyfed.functional.gaussian_mechanism import analytic_sigma
from polyfed.plugins.upload_privacy import UploadPrivacy, clipped_entries


class PrivacyBudget(Plugin):
    """The account of what a run releases, read off its records; noise for a target; the end before a budget is spent.

    Attributes:
        settings: with the noise that a target asks for, once validated. has_noise: whether anything that clients give
            away is noised. draws_rows: whether rows are drawn for any of that.
    """

    name = "privacy budget"

    def __init__(self, settings: Privacy | None = None) -> None:
        super().__init__(settings or Privacy())
        self.has_noise = False
        self.draws_rows = False

    def validate(self, setup: Setup) -> None:
        """Make the noise that a target asks for, and give it to the clients.

        Raises:
            ConfigError: what is released cannot be accounted for, a budget cannot be kept, or DP-SGD cannot be had of
                these networks.
        """
        self._method, self._training = setup.method, setup.training
        self._rows = {client.id: client.n for client in setup.clients if client.id not in setup.held_out}
        self._cohort, self._present = setup.cohort, setup.present
        upload_privacy = find(setup.plugins, UploadPrivacy)
        if upload_privacy is not None:
            self.settings = upload_privacy.settings
        self.settings = self._with_noise(self.settings)
        self._ledger = PrivacyLedger(self.settings, self._expected)
        expected = [release for client in self._rows for release in self._expected(client)]
        self.has_noise = bool(expected)
        self.draws_rows = any(release.sampled for release in expected)
        for client in setup.clients:
            client.privacy = self.settings
        firsts = [*setup.first_of_each_architecture().values()]
        check_dp_sgd(setup.method, self.settings, firsts, setup.model_factory, setup.precision)
        self._check()

    def facts(self) -> dict[str, Any]:
        """The settings of `[privacy]`, with the noise that was made."""
        said = self.settings.effective()
        return {UploadPrivacy.name: said} if said else {}

    def select(self, round: Round) -> None:
        """Begin to count."""
        round.notes[self.name] = {}

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        """Count what the clients have given away."""
        if not self.has_noise:
            return
        released: dict[int, list[Release]] = round.notes[self.name]
        for job, left, arrived in zip(jobs, sent, read, strict=True):
            if left.dropped:
                continue
            number = arrived.client_id
            entries = None
            if left.bytes_up > 0 and number not in round.silenced:
                # of an upload that nobody could read there are at most so many
                entries = len(clipped_entries(arrived.message) if arrived.counts else left.message)
            released.setdefault(number, []).extend(self.releases(number, entries, job.exchange))

    def should_stop(self, history: Records, rounds: Sequence[int], final: bool = False) -> str | None:
        """The budget would not last for these rounds."""
        if not self.settings.max_epsilon:
            return None
        who = self._present if final else self._cohort
        clients = [client for number in rounds for client in who(number)]
        return "would exceed privacy.max_epsilon" if self.would_exceed(history, clients) else None

    def record(self, round: Round) -> dict[str, Any]:
        """What has been released, in this round and in all.

        Raises:
            RoundRefused: that is more than the budget. ConfigError: already in the first round.
        """
        if not self.has_noise:
            return {}
        released = round.notes[self.name]
        self._ledger.update(round.history)
        if self._ledger.exceeded(released):
            if not round.history:
                raise self._too_little(released)
            raise RoundRefused
        return {
            "epsilon": self._ledger.epsilon(released),
            "delta": self.settings.delta,
            "releases": to_record(released),
        }

    def _check(self) -> None:
        """Whether what is released can be accounted for, and a budget kept."""
        accounting.require_packages(release for client in self._rows for release in self._expected(client))
        budget = self.settings.max_epsilon
        if budget and (has_upload(self._method) or self.settings.max_grad_norm) and not self.has_noise:
            raise ConfigError(
                f"privacy.max_epsilon: expected noise, without which there is no epsilon, got {budget:g} alone"
            )
        if budget and self.would_exceed([], self._cohort(1)):
            raise self._too_little(self._ledger.predict_next(self._cohort(1)))

    def releases(self, client: int, entries: int | None, exchange: Exchange) -> list[Release]:
        """What a client gives away in an exchange.

        Args:
            entries: that are bounded, of what it uploads; None: nothing left it.
        """
        return self._given(client, entries, self.settings, exchange)

    def would_exceed(self, records: Records, clients: Sequence[int]) -> bool:
        """Whether the budget would not last if these clients released what they did last."""
        if not self.settings.max_epsilon or not self.has_noise:
            return False
        self._ledger.update(records)
        return self._ledger.exceeded(self._ledger.predict_next(clients))

    def _too_little(self, released: Mapping[int, Sequence[Release]]) -> ConfigError:
        least = max(self._ledger.epsilon(released).values())
        return ConfigError(
            f"privacy.max_epsilon: expected at least {least:.4g}, what the first round comes to, got "
            f"{self.settings.max_epsilon:g}"
        )

    def _given(self, client: int, entries: int | None, settings: Privacy, exchange: Exchange) -> list[Release]:
        found = []
        if exchange.trains:
            phases = self._method.phases(self._training) if exchange.phases is None else exchange.phases
            found += of_training(settings, self._training, phases, self._rows[client])
        if entries is not None and has_upload(self._method):
            found += self._method.privacy_releases(self._training, self._rows[client])
            if settings.upload_noise_multiplier and entries:
                found.append(Release("upload", "client", settings.upload_noise_std(entries) / math.sqrt(entries)))
        return found

    def _expected(self, client: int) -> list[Release]:
        """What a client's first round gives away, each of its uploads having one bounded entry."""
        return [release for one in self._method.exchanges(1) for release in self.releases(client, 1, one)]

    def _with_noise(self, settings: Privacy) -> Privacy:
        """The settings, with the noise that a target asks for, for who is to take part most often."""
        if not settings.target_epsilon:
            return settings
        turns: dict[int, list[Exchange]] = {client: [] for client in self._rows}
        for number in range(1, self._training.rounds + 1):
            for client in self._cohort(number):
                turns[client].extend(self._method.exchanges(number))
        for own in turns.values():
            own.extend(self._method.final_exchanges())
        made = {}
        if settings.upload_clip_norm and has_upload(self._method):
            made["upload_noise_multiplier"] = analytic_sigma(1.0, settings.target_epsilon, settings.delta) * math.sqrt(
                max(map(len, turns.values()))
            )
        if settings.max_grad_norm:

            def released(noise: float) -> Iterator[list[Release]]:
                tried = settings.model_copy(update={"noise_multiplier": noise})
                for client, own in turns.items():
                    yield [r for e in own for r in self._given(client, 0, tried, e)]

            made["noise_multiplier"] = accounting.calibrate_noise(released, settings)
        return settings.model_copy(update=made)
