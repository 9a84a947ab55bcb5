"""Podman's stores of images, once per test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.podman import build_image, close_store, open_store


@pytest.fixture(scope="session")
def podman_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A store of podman with the base image. Return the variables that select it."""
    folder = tmp_path_factory.mktemp("podman")
    chosen = open_store(folder)
    yield chosen
    close_store(folder, chosen)


@pytest.fixture(scope="session")
def image_store(podman_store: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The store, with distrib's image for CPUs, whose build takes two minutes on two idle cores."""
    build_image(tmp_path_factory.mktemp("packages"), podman_store)
    return podman_store
