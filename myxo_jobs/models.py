"""The table: one row is one job, and the row is the queue."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Now
from django.db.models.lookups import IsNull
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from myxo_jobs.payloads import KEY_CHARACTERS

# What is long: payloads, tracebacks, results. A list does without.
LONG_COLUMNS = ("payload", "error", "traceback", "attempt_log", "result", "again")

# Leaves room in a topic for `.finished`.
KIND_CHARACTERS = 200

_TWO = "[0-9][0-9]"
SQLITE_MOMENT_GLOB = f"{_TWO}{_TWO}-{_TWO}-{_TWO} {_TWO}:{_TWO}:{_TWO}.{_TWO}[0-9]"


class MomentField(models.DateTimeField):  # type: ignore[type-arg]
    """A moment by the database's clock.

    On SQLite it is UTC text `YYYY-MM-DD HH:MM:SS.sss` whatever USE_TZ and TIME_ZONE
    say, so that moments compare as text; a CHECK refuses every other form. In Python
    it is what a DateTimeField gives: aware with USE_TZ, else naive in the project's zone.
    """

    def db_check(self, connection: BaseDatabaseWrapper) -> str | None:
        if connection.vendor != "sqlite":
            return None
        column = connection.ops.quote_name(str(self.column))
        return f"{column} IS NULL OR {column} GLOB '{SQLITE_MOMENT_GLOB}'"

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        if not prepared:
            value = self.get_prep_value(value)
        if isinstance(value, datetime):
            if timezone.is_naive(value):
                value = timezone.make_aware(value)
            value = value.astimezone(UTC)
            if connection.vendor == "sqlite":
                return sqlite_moment(value)
            return value
        return super().get_db_prep_value(value, connection, prepared=True)

    def from_db_value(
        self, value: datetime | None, expression: object, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        if value is None or connection.vendor != "sqlite":
            return value
        # The text is UTC, whatever zone Django attached to it or left out.
        moment = value.replace(tzinfo=UTC)
        return moment if settings.USE_TZ else timezone.make_naive(moment)


def sqlite_moment(moment: datetime) -> str:
    """Return an aware moment as SQLite stores it."""
    utc = moment.astimezone(UTC)
    return f"{utc:%Y-%m-%d %H:%M:%S}.{utc.microsecond // 1000:03d}".rjust(23, "0")


def moment_of(raw: float | str) -> datetime:
    """Return a moment as the model's fields give it: of seconds since 1970, or SQLite's text."""
    if isinstance(raw, str):
        moment = datetime.fromisoformat(raw).replace(tzinfo=UTC)
    else:
        moment = datetime.fromtimestamp(raw, UTC)
    return moment if settings.USE_TZ else timezone.make_naive(moment)


class JobManager(models.Manager):  # type: ignore[type-arg]
    """Jobs as the primary database has them: a replica's rows would be old news."""

    def get_queryset(self) -> models.QuerySet[Job]:
        rows = super().get_queryset()
        return rows if self._db else rows.using(router.db_for_write(self.model))


class ServiceSettingsManager(models.Manager):  # type: ignore[type-arg]
    """As `JobManager`."""

    def get_queryset(self) -> models.QuerySet[ServiceSettings]:
        rows = super().get_queryset()
        return rows if self._db else rows.using(router.db_for_write(self.model))


class Job(models.Model):
    """One piece of work. A done one leaves, or is kept; a failed one stays for a person."""

    class Status(models.TextChoices):
        PENDING = "pending", _("pending")
        RUNNING = "running", _("running")
        DONE = "done", _("done")
        FAILED = "failed", _("failed")

    id = models.BigAutoField(primary_key=True)
    topic = models.CharField(_("topic"), max_length=255)
    # At most one job of a key is in the queue: waiting, running or failed.
    key = models.CharField(_("key"), max_length=KEY_CHARACTERS, null=True, blank=True)  # noqa: DJ001
    # The request as JSON text. Text, not a JSON column: jsonb changes what it stores.
    payload = models.TextField(_("payload"))
    # Higher runs first, within the topic.
    priority = models.SmallIntegerField(_("priority"), db_default=0)
    # When it may first be claimed, and its place in the line. A retry moves it, a
    # claim or a give-back never does; NULL once a kept job is done.
    due = MomentField(_("due"), null=True, blank=True, db_default=Now())
    # The token of the claim, empty when there is none, and the claim's end.
    worker = models.CharField(_("worker"), max_length=40, blank=True, db_default="")
    lease_until = MomentField(_("claimed until"), null=True, blank=True)
    # Runs started or, for a claimed job, about to be. The claim adds one, a give-back
    # takes it back, an operator may reset it.
    attempts = models.PositiveIntegerField(_("attempts"), db_default=0)
    # Stays for a person; never claimed. A failed row has no claim.
    failed = models.BooleanField(_("failed"), db_default=False)
    # Of the last failed attempt: `Type: message`, and the traceback's head and tail.
    error = models.TextField(_("error"), blank=True, db_default="")
    traceback = models.TextField(_("traceback"), blank=True, db_default="")
    # The newest request put with again=True while the job was claimed, as JSON text:
    # when the claim ends, however it ends, the row waits with it as its payload.
    again = models.TextField(_("again"), null=True, blank=True)  # noqa: DJ001
    status = models.GeneratedField(
        verbose_name=_("status"),
        expression=Case(
            When(failed=True, then=Value("failed")),
            When(due__isnull=True, then=Value("done")),
            When(~Q(worker=""), then=Value("running")),
            default=Value("pending"),
        ),
        output_field=models.CharField(max_length=7, choices=Status.choices),
        db_persist=True,
    )
    created_at = MomentField(_("put"), db_default=Now())
    started_at = MomentField(_("last claimed"), null=True, blank=True)

    # -- of kept and failed jobs; NULL in a plain one, where it takes no room.
    # Its name towards its owner, a uuid7. A claim gives it to a kept job without one.
    uid = models.UUIDField(_("uid"), null=True, blank=True)
    # The end, done or failed. On a job that waits or runs it tells of an earlier end.
    completed_at = MomentField(_("ended"), null=True, blank=True)
    # Moves with status and progress, not with renewals.
    updated_at = MomentField(_("last change"), null=True, blank=True)
    # Milliseconds from the last claim to the end.
    duration_ms = models.BigIntegerField(_("milliseconds"), null=True, blank=True)
    # What the handler returned, as JSON text.
    result = models.TextField(_("result"), null=True, blank=True)  # noqa: DJ001
    # JSON text: a list of the attempts that ended, the first and the last 19.
    attempt_log = models.TextField(_("attempt log"), null=True, blank=True)  # noqa: DJ001
    # From then on an ended job is gone for its owner, whatever the sweep has done yet.
    expires_at = MomentField(_("expires"), null=True, blank=True)
    last_accessed_at = MomentField(_("last fetched"), null=True, blank=True)
    # Somebody asked it to stop while it ran. NULL again with the outcome.
    cancelled_at = MomentField(_("asked to stop"), null=True, blank=True)
    # What the handler noted last; each attempt starts empty.
    progress_done = models.FloatField(_("progress"), null=True, blank=True)
    progress_total = models.FloatField(_("progress of"), null=True, blank=True)
    progress_note = models.CharField(_("progress note"), max_length=255, null=True, blank=True)  # noqa: DJ001
    # Whom it is for: the label of a model and the key of one of its rows.
    owner_kind = models.CharField(_("owner's kind"), max_length=255, null=True, blank=True)  # noqa: DJ001
    owner_id = models.CharField(_("owner's id"), max_length=255, null=True, blank=True)  # noqa: DJ001
    # What its file is called when the owner fetches it.
    preferred_name = models.CharField(_("file name"), max_length=255, null=True, blank=True)  # noqa: DJ001
    # Why it failed, in one word and in a sentence for its owner.
    reason = models.CharField(_("reason"), max_length=16, null=True, blank=True)  # noqa: DJ001
    message = models.TextField(_("message"), null=True, blank=True)  # noqa: DJ001
    # The language and the zone that were active at the put.
    language = models.CharField(_("language"), max_length=35, null=True, blank=True)  # noqa: DJ001
    time_zone = models.CharField(_("time zone"), max_length=64, null=True, blank=True)  # noqa: DJ001
    # What a service says of its work.
    bytes_in = models.BigIntegerField(_("bytes in"), null=True, blank=True)
    bytes_out = models.BigIntegerField(_("bytes out"), null=True, blank=True)
    item_count = models.BigIntegerField(_("items"), null=True, blank=True)

    objects = JobManager()

    class Meta:
        db_table = "myxo_jobs"
        # Also refresh_from_db() reads the primary.
        base_manager_name = "objects"
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        constraints = [
            models.UniqueConstraint(
                fields=["key"],
                condition=Q(key__isnull=False, due__isnull=False),
                name="myxo_jobs_key",
            ),
            models.UniqueConstraint(
                fields=["uid"], condition=Q(uid__isnull=False), name="myxo_jobs_uid"
            ),
        ]
        # A claim of a plain job writes worker, lease_until, attempts, started_at and status.
        # None of them stands in an index or its condition, so that it updates no index.
        indexes = [
            models.Index(
                fields=["topic", "-priority", "due", "id"],
                condition=Q(failed=False, due__isnull=False),
                name="myxo_jobs_claim",
            ),
            models.Index(fields=["id"], condition=Q(failed=True), name="myxo_jobs_failed"),
            # Of kept jobs alone: the rows of a kind by state, and of an owner, by age.
            models.Index(
                F("topic"),
                F("failed"),
                IsNull(F("due"), True),
                F("uid"),
                condition=Q(uid__isnull=False),
                name="myxo_jobs_kept",
            ),
            models.Index(
                fields=["owner_kind", "owner_id", "uid"],
                condition=Q(owner_kind__isnull=False),
                name="myxo_jobs_owner",
            ),
            models.Index(
                fields=["expires_at"],
                condition=Q(expires_at__isnull=False),
                name="myxo_jobs_expires",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.pk}"

    @property
    def kind(self) -> str:
        return self.topic

    @property
    def retry_count(self) -> int:
        """How many runs came after the first."""
        return max(self.attempts - 1, 0)


class ServiceSettings(models.Model):
    """The dials of one service, as a person set them: they come before the setting and the class.

    An empty one leaves the word to those. Workers take a change up within seconds.
    """

    kind = models.CharField(_("kind"), max_length=KIND_CHARACTERS, primary_key=True)
    # How long an ended job stays for its owner.
    retention_seconds = models.PositiveIntegerField(
        _("retention in seconds"), null=True, blank=True
    )
    # How many jobs run at once in the whole deployment; 0 pauses the kind.
    max_concurrent = models.PositiveIntegerField(_("most at once"), null=True, blank=True)
    # How long one run may take.
    job_timeout_seconds = models.PositiveIntegerField(
        _("longest run in seconds"), null=True, blank=True, validators=[MinValueValidator(1)]
    )

    objects = ServiceSettingsManager()

    class Meta:
        db_table = "myxo_jobs_service_settings"
        base_manager_name = "objects"
        verbose_name = _("service")
        verbose_name_plural = _("services")

    def __str__(self) -> str:
        return self.kind
