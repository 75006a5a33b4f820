"use strict";
// Filters such as `tp=8 gib<70 full`: comparisons of quantities, and words in the title, for the table and the map.

const COMPARE = {
  "=": (a, b) => a === b, "!=": (a, b) => a !== b,
  "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
};
const FIGURES = ["tp", "pp", "vp", "cp", "ep", "etp", "mbs", "gib", "s"];

// Returns {wrong} or {test(figures, title)}, where title is a function, called only if the filter contains words.
function parseFilter(text) {
  const tests = [];
  for (const word of text.toLowerCase().split(/[\s,]+/).filter(Boolean)) {
    const match = word.match(/^([a-z]+)(<=|>=|!=|=|<|>)([0-9.]+)$/);
    if (match && FIGURES.includes(match[1])) {
      const [, key, sign, number] = match;
      tests.push((figures) => COMPARE[sign](figures(key), Number(number)));
    } else if (/[<>=]/.test(word)) {
      return { wrong: `“${word}” is not a comparison such as tp=8 or gib<70; quantities: ${FIGURES.join(", ")}` };
    } else {
      tests.push((figures, title) => title().toLowerCase().includes(word));
    }
  }
  return { test: (figures, title) => tests.every((test) => test(figures, title)), any: tests.length > 0 };
}
