"""The admin's screens. Only the admin's autodiscover imports them."""

from django.contrib import admin

from myxo_jobs.admin.jobs import JobAdmin
from myxo_jobs.admin.services import ServiceSettingsAdmin
from myxo_jobs.models import Job, ServiceSettings

admin.site.register(Job, JobAdmin)
admin.site.register(ServiceSettings, ServiceSettingsAdmin)
