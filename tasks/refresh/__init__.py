"""The refresh of the champion."""
