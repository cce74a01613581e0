import django.db.models.functions.datetime
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
                (
                    "again",
                    models.TextField(blank=True, null=True, verbose_name="again"),
                ),
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
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("due__isnull", False), ("key__isnull", False)),
                        fields=("key",),
                        name="myxo_jobs_key",
                    )
                ],
            },
        ),
        migrations.RunPython(tune_table, migrations.RunPython.noop),
    ]
