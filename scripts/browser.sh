#!/usr/bin/env bash
# Install Chromium and its driver for the browser tests, on Debian and Ubuntu, as root. Elsewhere it says what is missing.
set -u
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    timeout 240 sh -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver' \
        >/dev/null 2>&1 && exit 0
fi
echo "no Chromium here: the browser tests will be skipped; install the packages chromium and chromium-driver"
