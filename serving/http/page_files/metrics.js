// Prometheus' text format.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Samples by name, as [{labels, value}].
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found) continue;
    const [, name, written, value] = found;
    const labels = Object.fromEntries([...(written ?? "").matchAll(LABEL)].map(([, key, text]) => [key, text]));
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(value) });
  }
  return samples;
}

// Sum over all label sets of a name; 0 if there is none.
export function total(samples, name) {
  return (samples.get(name) ?? []).reduce((sum, { value }) => sum + value, 0);
}
