"""Imports Lorry before torch, so that torch's threads wait as they do in service."""

import lorry  # noqa: F401
