// Elements from code. Texts enter as text nodes, never as HTML.

export const find = (selector, within = document) => within.querySelector(selector);

export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Shows text in an element, or hides the element if there is none.
export function say(element, text) {
  element.textContent = text;
  element.hidden = text === "";
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export function duration(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`;
}
