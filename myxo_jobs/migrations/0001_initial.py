import django.core.validators
import django.db.models.functions.datetime
import django.db.models.lookups
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

import myxo_jobs.models
from myxo_jobs.databases import database_of


def tune_table(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Set what the table's rows, which change often and die young, need of their database."""
    for statement in database_of(schema_editor.connection).tune_table():
        schema_editor.execute(statement)


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Job",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("topic", models.CharField(max_length=255, verbose_name="topic")),
                (
                    "key",
                    models.CharField(blank=True, max_length=255, null=True, verbose_name="key"),
                ),
                ("payload", models.TextField(verbose_name="payload")),
                ("priority", models.SmallIntegerField(db_default=0, verbose_name="priority")),
                (
                    "due",
                    myxo_jobs.models.MomentField(
                        blank=True,
                        db_default=django.db.models.functions.datetime.Now(),
                        null=True,
                        verbose_name="due",
                    ),
                ),
                (
                    "worker",
                    models.CharField(
                        blank=True, db_default="", max_length=40, verbose_name="worker"
                    ),
                ),
                (
                    "lease_until",
                    myxo_jobs.models.MomentField(
                        blank=True, null=True, verbose_name="claimed until"
                    ),
                ),
                ("attempts", models.PositiveIntegerField(db_default=0, verbose_name="attempts")),
                ("failed", models.BooleanField(db_default=False, verbose_name="failed")),
                ("error", models.TextField(blank=True, db_default="", verbose_name="error")),
                (
                    "traceback",
                    models.TextField(blank=True, db_default="", verbose_name="traceback"),
                ),
                ("again", models.TextField(blank=True, null=True, verbose_name="again")),
                (
                    "status",
                    models.GeneratedField(
                        db_persist=True,
                        expression=models.Case(
                            models.When(failed=True, then=models.Value("failed")),
                            models.When(due__isnull=True, then=models.Value("done")),
                            models.When(
                                models.Q(("worker", ""), _negated=True),
                                then=models.Value("running"),
                            ),
                            default=models.Value("pending"),
                        ),
                        output_field=models.CharField(
                            choices=[
                                ("pending", "pending"),
                                ("running", "running"),
                                ("done", "done"),
                                ("failed", "failed"),
                            ],
                            max_length=7,
                        ),
                        verbose_name="status",
                    ),
                ),
                (
                    "created_at",
                    myxo_jobs.models.MomentField(
                        db_default=django.db.models.functions.datetime.Now(), verbose_name="put"
                    ),
                ),
                (
                    "started_at",
                    myxo_jobs.models.MomentField(
                        blank=True, null=True, verbose_name="last claimed"
                    ),
                ),
                ("uid", models.UUIDField(blank=True, null=True, verbose_name="uid")),
                (
                    "completed_at",
                    myxo_jobs.models.MomentField(blank=True, null=True, verbose_name="ended"),
                ),
                (
                    "updated_at",
                    myxo_jobs.models.MomentField(blank=True, null=True, verbose_name="last change"),
                ),
                (
                    "duration_ms",
                    models.BigIntegerField(blank=True, null=True, verbose_name="milliseconds"),
                ),
                ("result", models.TextField(blank=True, null=True, verbose_name="result")),
                (
                    "attempt_log",
                    models.TextField(blank=True, null=True, verbose_name="attempt log"),
                ),
                (
                    "expires_at",
                    myxo_jobs.models.MomentField(blank=True, null=True, verbose_name="expires"),
                ),
                (
                    "last_accessed_at",
                    myxo_jobs.models.MomentField(
                        blank=True, null=True, verbose_name="last fetched"
                    ),
                ),
                (
                    "cancelled_at",
                    myxo_jobs.models.MomentField(
                        blank=True, null=True, verbose_name="asked to stop"
                    ),
                ),
                (
                    "progress_done",
                    models.FloatField(blank=True, null=True, verbose_name="progress"),
                ),
                (
                    "progress_total",
                    models.FloatField(blank=True, null=True, verbose_name="progress of"),
                ),
                (
                    "progress_note",
                    models.CharField(
                        blank=True, max_length=255, null=True, verbose_name="progress note"
                    ),
                ),
                (
                    "owner_kind",
                    models.CharField(
                        blank=True, max_length=255, null=True, verbose_name="owner's kind"
                    ),
                ),
                (
                    "owner_id",
                    models.CharField(
                        blank=True, max_length=255, null=True, verbose_name="owner's id"
                    ),
                ),
                (
                    "preferred_name",
                    models.CharField(
                        blank=True, max_length=255, null=True, verbose_name="file name"
                    ),
                ),
                (
                    "reason",
                    models.CharField(blank=True, max_length=16, null=True, verbose_name="reason"),
                ),
                ("message", models.TextField(blank=True, null=True, verbose_name="message")),
                (
                    "language",
                    models.CharField(blank=True, max_length=35, null=True, verbose_name="language"),
                ),
                (
                    "time_zone",
                    models.CharField(
                        blank=True, max_length=64, null=True, verbose_name="time zone"
                    ),
                ),
                (
                    "bytes_in",
                    models.BigIntegerField(blank=True, null=True, verbose_name="bytes in"),
                ),
                (
                    "bytes_out",
                    models.BigIntegerField(blank=True, null=True, verbose_name="bytes out"),
                ),
                ("item_count", models.BigIntegerField(blank=True, null=True, verbose_name="items")),
            ],
            options={
                "verbose_name": "job",
                "verbose_name_plural": "jobs",
                "db_table": "myxo_jobs",
                "base_manager_name": "objects",
                "indexes": [
                    models.Index(
                        condition=models.Q(("due__isnull", False), ("failed", False)),
                        fields=["topic", "-priority", "due", "id"],
                        name="myxo_jobs_claim",
                    ),
                    models.Index(
                        condition=models.Q(("failed", True)), fields=["id"], name="myxo_jobs_failed"
                    ),
                    models.Index(
                        models.F("topic"),
                        models.F("failed"),
                        django.db.models.lookups.IsNull(models.F("due"), True),
                        models.F("uid"),
                        condition=models.Q(("uid__isnull", False)),
                        name="myxo_jobs_kept",
                    ),
                    models.Index(
                        condition=models.Q(("owner_kind__isnull", False)),
                        fields=["owner_kind", "owner_id", "uid"],
                        name="myxo_jobs_owner",
                    ),
                    models.Index(
                        condition=models.Q(("expires_at__isnull", False)),
                        fields=["expires_at"],
                        name="myxo_jobs_expires",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("due__isnull", False), ("key__isnull", False)),
                        fields=("key",),
                        name="myxo_jobs_key",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("uid__isnull", False)),
                        fields=("uid",),
                        name="myxo_jobs_uid",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="ServiceJob",
            fields=[],
            options={
                "verbose_name": "service job",
                "verbose_name_plural": "service jobs",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("myxo_jobs.job",),
        ),
        migrations.CreateModel(
            name="ServiceSettings",
            fields=[
                (
                    "kind",
                    models.CharField(
                        max_length=200, primary_key=True, serialize=False, verbose_name="kind"
                    ),
                ),
                (
                    "retention_seconds",
                    models.PositiveIntegerField(
                        blank=True, null=True, verbose_name="retention in seconds"
                    ),
                ),
                (
                    "max_concurrent",
                    models.PositiveIntegerField(blank=True, null=True, verbose_name="most at once"),
                ),
                (
                    "job_timeout_seconds",
                    models.PositiveIntegerField(
                        blank=True,
                        null=True,
                        validators=[django.core.validators.MinValueValidator(1)],
                        verbose_name="longest run in seconds",
                    ),
                ),
            ],
            options={
                "verbose_name": "service",
                "verbose_name_plural": "services",
                "db_table": "myxo_jobs_service_settings",
                "base_manager_name": "objects",
            },
        ),
        migrations.RunPython(tune_table, migrations.RunPython.noop),
    ]
