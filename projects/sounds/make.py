"""Makes tones with noise, as spectra over time, and writes them into an .npz file.

python -m projects.sounds.make FILE.npz [EXAMPLES]
"""

import sys

import numpy as np

FRAMES, BANDS, RATE, WINDOW = 16, 32, 8000, 256  # of a tone; RATE in samples a second, WINDOW in samples of a frame
WAVES = {
  "sine": np.sin,
  "square": lambda phase: np.sign(np.sin(phase)),
  "saw": lambda phase: (phase / np.pi) % 2 - 1,
}


def tones(count: int, seed: int = 0) -> dict[str, np.ndarray]:
  """Tones of random waves, pitches and loudness.

  Returns:
    features: [count, FRAMES, BANDS], the logarithm of the power in each band of each frame, about -4 to 4.
    label: [count], the wave, as a number of WAVES.
    target: [count, 2], the pitch in octaves above 220 Hz, and the loudness in units of ten decibels.
  """
  random = np.random.default_rng(seed)
  label, pitch, loudness = (
    random.integers(0, len(WAVES), count),
    random.uniform(0, 2, count),
    random.normal(0, 1, count),
  )
  time = np.arange(FRAMES * WINDOW) / RATE
  phase = 2 * np.pi * (220 * 2 ** pitch[:, None] * time + random.uniform(0, 1, (count, 1)))
  waves = np.stack([wave(phase) for wave in WAVES.values()])[label, np.arange(count)]
  sound = 10 ** (loudness[:, None] / 2) * waves + random.normal(0, 0.1, phase.shape)
  power = np.abs(np.fft.rfft(sound.reshape(count, FRAMES, WINDOW) * np.hanning(WINDOW)))[..., 1:] ** 2
  bands = np.log10(power.reshape(count, FRAMES, BANDS, -1).sum(axis=-1))
  target = np.stack([pitch, loudness], axis=1)
  return {
    "features": bands.astype(np.float32), "label": label.astype(np.int32), "target": target.astype(np.float32)
  }  # fmt: skip


if __name__ == "__main__":
  np.savez(sys.argv[1], **tones(int(sys.argv[2]) if len(sys.argv) > 2 else 4000))
