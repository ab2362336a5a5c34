// Live updates; the page is whole without them.
//
// A page that changes names its pace in <main data-live>. It is asked for again at that pace, with
// the version at hand, and what differs is patched in: what is open, focused or being typed stays.
// Live output of running steps comes as Server-Sent Events from <main data-stream>.
"use strict";

(() => {
  const LONGEST_OUTPUT = 20000;
  const SLOWEST = 10000;
  let version = null;
  let failures = 0;
  let stream = null;
  const outputs = new Map();

  const main = () => document.getElementById("main");

  // Asking again

  function ask() {
    const pace = Number(main().dataset.live);
    if (!pace) {
      listen();
      return;
    }
    setTimeout(() => {
      if (document.hidden) {
        document.addEventListener("visibilitychange", () => load(ask), { once: true });
      } else {
        load(ask);
      }
    }, Math.min(pace * 2 ** failures, SLOWEST));
  }

  function load(done) {
    // XMLHttpRequest reads HTML into a document without any sink for scripts.
    const request = new XMLHttpRequest();
    request.open("GET", location.href);
    request.responseType = "document";
    request.timeout = 15000;
    if (version) request.setRequestHeader("If-None-Match", version);
    request.onload = () => {
      if (request.status === 200 && request.responseXML) {
        if (new URL(request.responseURL).pathname !== location.pathname) {
          location.reload();
          return;
        }
        version = request.getResponseHeader("ETag");
        patch(document.body, request.responseXML.body);
        document.title = request.responseXML.title;
        tick.base();
        show();
      } else if (request.status === 401 || request.status === 403 || request.status === 404) {
        location.reload();
        return;
      }
      reached(request.status < 500);
      listen();
      done();
    };
    request.onerror = request.ontimeout = () => {
      reached(false);
      done();
    };
    request.send();
  }

  function reached(good) {
    failures = good ? 0 : failures + 1;
    const offline = document.querySelector(".offline");
    if (offline) offline.hidden = failures < 2;
  }

  // Patching: as few nodes as possible change, found again by their ids

  function patch(old, fresh) {
    const byId = new Map();
    for (const child of old.children) if (child.id) byId.set(child.id, child);
    let at = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      let found = wanted.id ? byId.get(wanted.id) : null;
      if (!found && at && alike(at, wanted)) found = at;
      if (!found) {
        old.insertBefore(document.importNode(wanted, true), at);
        continue;
      }
      if (found === at) at = at.nextSibling;
      else old.insertBefore(found, at);
      if (found.nodeType === Node.ELEMENT_NODE) patchElement(found, wanted);
      else if (found.data !== wanted.data) found.data = wanted.data;
    }
    while (at) {
      const gone = at;
      at = at.nextSibling;
      gone.remove();
    }
  }

  function alike(one, other) {
    return one.nodeType === other.nodeType && one.nodeName === other.nodeName && (one.id || "") === (other.id || "");
  }

  function patchElement(old, fresh) {
    const isOutput = "liveOutput" in old.dataset;
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !(name === "open" && old.matches("details"))) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      const kept = (name === "hidden" && isOutput) || (name === "open" && old.matches("details"));
      if (!kept && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    if (!isOutput && !old.matches("textarea")) patch(old, fresh);
  }

  // Live output

  function listen() {
    const source = main().dataset.stream;
    const wanted = Boolean(source) && !document.hidden;
    if (wanted && !stream) {
      stream = new EventSource(source);
      stream.onmessage = (event) => hear(JSON.parse(event.data));
    } else if (!wanted && stream) {
      stream.close();
      stream = null;
    }
  }

  function hear({ step_id: step, seq, data }) {
    let output = outputs.get(step);
    if (!output) {
      output = { text: "", next: 0, reader: reader() };
      outputs.set(step, output);
    }
    if (seq === 0 && output.next > 0) {
      // The body runs again.
      output.text = "";
      output.next = 0;
      output.reader = reader();
    }
    if (seq !== output.next) {
      output.text += "…";
      output.reader = reader(true);
    }
    output.next = seq + 1;
    output.text = (output.text + output.reader(data)).slice(-LONGEST_OUTPUT);
    show();
  }

  function show() {
    for (const place of document.querySelectorAll("[data-live-output]")) {
      const output = outputs.get(place.dataset.liveOutput);
      if (!output || !output.text || place.textContent === output.text) continue;
      const atEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 20;
      place.hidden = false;
      place.textContent = output.text;
      if (atEnd) place.scrollTop = place.scrollHeight;
    }
  }

  // A provider's stream is Server-Sent Events with JSON in them, of which the words are wanted.
  // Anything else is shown as it comes.
  function reader(inTheMiddle) {
    let rest = "";
    let isEvents = null;
    return (data) => {
      rest += data;
      if (isEvents === null) {
        if (inTheMiddle) {
          const line = /\n((?:data|event|id|retry)?:[\s\S]*)/.exec(rest);
          if (line) rest = line[1];
        }
        if (/^(d|da|dat|data|e|ev|eve|even|event|i|id|r|re|ret|retr|retry)?$/.test(rest)) return "";
        isEvents = /^(data|event|id|retry)?:/.test(rest);
      }
      if (!isEvents) {
        const text = rest;
        rest = "";
        return text;
      }
      const lines = rest.split("\n");
      rest = lines.pop();
      return lines.map(words).join("");
    };
  }

  function words(line) {
    if (!line.startsWith("data:")) return "";
    let message;
    try {
      message = JSON.parse(line.slice(5));
    } catch {
      return "";
    }
    if (message === null || typeof message !== "object") return "";
    if (message.type === "response.output_text.delta") return text(message.delta);
    if (message.type === "content_block_delta") return text(message.delta?.text);
    if (!Array.isArray(message.choices)) return "";
    return message.choices.map((choice) => text(choice?.delta?.content ?? choice?.text)).join("");
  }

  function text(value) {
    return typeof value === "string" ? value : "";
  }

  // Durations that grow, and times that are left

  const tick = {
    began: performance.now(),
    base() {
      tick.began = performance.now();
    },
    now() {
      const passed = (performance.now() - tick.began) / 1000;
      for (const place of document.querySelectorAll("[data-counts]")) {
        place.textContent = duration(Number(place.dataset.counts) + passed);
      }
      for (const place of document.querySelectorAll("[data-counts-down]")) {
        place.textContent = duration(Math.max(Number(place.dataset.countsDown) - passed, 0));
      }
    },
  };

  function duration(seconds) {
    if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds);
    if (whole >= 86400) return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
    if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
    return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  }

  document.addEventListener("visibilitychange", listen);
  setInterval(() => document.hidden || tick.now(), 1000);
  listen();
  ask();
})();
