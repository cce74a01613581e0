"""The addresses of the example site."""

from django.contrib import admin
from django.contrib.auth.views import LoginView, LogoutView
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("accounts/login/", LoginView.as_view(template_name="notes/login.html"), name="login"),
    path("accounts/logout/", LogoutView.as_view(), name="logout"),
    path("jobs/", include("myxo_jobs.services.urls")),
    path("", include("example_project.notes.urls")),
]
