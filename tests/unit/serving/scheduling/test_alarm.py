from __future__ import annotations

import asyncio

from flambeau.serving.scheduling.alarm import Alarm


def test_alarm_rings_once_and_can_be_set_again():
    async def ring():
        rung = []
        alarm = Alarm(lambda: rung.append(True))
        for _ in range(2):
            alarm.set(0.001)
            alarm.set(0.001)
            await asyncio.sleep(0.02)
        alarm.set(0.001)
        alarm.cancel()
        alarm.cancel()
        await asyncio.sleep(0.02)
        return len(rung)

    assert asyncio.run(ring()) == 2
