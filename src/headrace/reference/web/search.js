// Search as you type, and an answer to what is pasted. Served pages ask the API; a static copy asks its own index.
"use strict";
(() => {
  const form = document.getElementById("search");
  const field = document.getElementById("q");
  const said = document.getElementById("said");
  const list = document.getElementById("results");
  const { api, explain, index, errors, suffix } = form.dataset;
  const MOST = 12;
  const PAUSE_MS = 120;
  let asked = 0;
  let timer = 0;

  const looksPasted = text => /\n/.test(text.trim()) || /(^|\s)[\w.]*(Error|Exception|Warning): \S/.test(text);

  function clear() {
    list.replaceChildren();
    list.hidden = true;
    said.textContent = "";
  }

  function show(entries, words) {
    list.replaceChildren(...entries.map(entry => {
      const item = document.createElement("li");
      const link = item.appendChild(document.createElement("a"));
      link.href = errors + entry.id + suffix;
      const kind = link.appendChild(document.createElement("span"));
      kind.className = "class";
      kind.textContent = entry.error_class;
      link.append(" " + (entry.template || "(no message)"));
      const place = item.appendChild(document.createElement("span"));
      place.className = "place";
      place.textContent = entry.place;
      return item;
    }));
    list.hidden = entries.length === 0;
    said.textContent = words;
  }

  const counted = number => number === 0 ? "No error has all of these words."
    : number >= MOST ? `The first ${number} errors; more words narrow it down.`
    : number === 1 ? "1 error." : `${number} errors.`;

  async function get(address, options) {
    const answer = await fetch(address, options);
    if (!answer.ok) throw new Error(answer.statusText);
    return answer.json();
  }

  async function searchServed(text, turn) {
    const found = await get(`${api}?${new URLSearchParams({ q: text, limit: MOST })}`);
    if (turn !== asked) return;
    show(found.results.map(entry => ({
      ...entry, place: `${entry.package} · ${entry.file}:${entry.line} · ${entry.qualname}`,
    })), counted(found.results.length));
  }

  async function explainServed(text, turn) {
    const body = JSON.stringify({ message: text });
    const found = await get(explain, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (turn !== asked) return;
    if (!found.found) {
      show([], found.advice);
      return;
    }
    const fix = found.fixes.length ? ` ${found.fixes[0].text}.` : "";
    show([{
      id: found.id, error_class: found.error_class, template: found.template,
      place: `${found.package.name} · ${found.site.file}:${found.site.line} · ${found.site.qualname}`,
    }], `It is ${found.how_sure}.${fix} Press Explain for all of it, with your values.`);
  }

  let loading;
  function loadIndex() {
    loading ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = index;
      script.onload = () => resolve(window.headraceErrors.map(([id, error_class, template, place]) => ({
        id, error_class, template, place, text: `${template} ${error_class} ${place}`.toLowerCase(),
      })));
      script.onerror = () => reject(new Error("the index is missing"));
      document.head.append(script);
    });
    return loading;
  }

  async function searchStatic(text, turn) {
    const entries = await loadIndex();
    if (turn !== asked) return;
    const words = text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
    const found = [];
    for (const entry of entries) {
      if (words.length && words.every(word => entry.text.includes(word))) found.push(entry);
      if (found.length === MOST) break;
    }
    show(found, counted(found.length));
  }

  async function search() {
    const turn = ++asked;
    const text = field.value.trim();
    if (text.length < 2) return clear();
    try {
      if (index) await searchStatic(text, turn);
      else if (looksPasted(text)) await explainServed(text, turn);
      else await searchServed(text, turn);
    } catch (error) {
      if (turn === asked) show([], `Searching failed: ${error.message}.`);
    }
  }

  function fit() {
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight + 2}px`;
  }

  fit();
  field.addEventListener("input", () => {
    fit();
    clearTimeout(timer);
    timer = setTimeout(search, PAUSE_MS);
  });
  field.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit(explain && looksPasted(field.value) ? form.querySelector(".second") : undefined);
  });
  form.addEventListener("submit", event => {
    if (!index) return;
    event.preventDefault();
    search();
  });
  if (index) {
    const given = new URLSearchParams(location.search).get("q");
    if (given) {
      field.value = given;
      fit();
      search();
    }
  }
})();
